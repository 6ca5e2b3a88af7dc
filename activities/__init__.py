"""Side effects of the workflows: thin and retryable, each a few lines over the domain."""
