"""Questions of coding agents: tools of the Model Context Protocol, and the skill beside them."""
