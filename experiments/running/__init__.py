"""Plans run by the runtime in processes of their own, and what each run came to."""
