"""ms-swift's flags, the command rlhf, and the names that its plug-ins import."""
