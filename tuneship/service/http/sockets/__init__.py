"""The HTTP server below the routes: sockets, connections, their limits and their log."""
