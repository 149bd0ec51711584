"""A federation over machines that do not trust each other, on Flower. Its messages carry our own bytes (`wire`,
`frames`), its server runs our own loop (`engine.rounds`), and a client is a shard of one client (`engine.shard`)."""
