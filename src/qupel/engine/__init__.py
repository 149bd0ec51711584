"""Where a federation runs. Engines move state and vectors; they know no concrete method."""
