"""The paper's tables and its figure, one command each; every table is driven by the TOML file of its name."""
