"""Published training recipes of the systems that figures look at."""
