"""From notebooks to a reproduction: run them, sum up, write the README's numbers, build the report."""
