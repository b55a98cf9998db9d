"""What a KV budget costs in quality, measured through the engine itself."""
