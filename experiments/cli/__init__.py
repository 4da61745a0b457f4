"""What commands have in common: options, errors, progress, folders of results."""
