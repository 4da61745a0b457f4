"""Systems measured side by side: what each tries, how a trial runs, what came out."""
