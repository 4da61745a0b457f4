"""The dialects of tables of measured runs: rules that turn free text into columns with types."""
