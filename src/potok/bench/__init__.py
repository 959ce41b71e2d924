"""Load tests of OpenAI-compatible servers, with a client cheap enough to share the machine with the server."""
