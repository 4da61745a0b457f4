"""An interface for coding agents: tools of the Model Context Protocol, and a skill."""
