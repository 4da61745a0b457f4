"""What all commands share: options, errors, progress reports, and folders of results."""
