"""From a scale, a method and a learning rate to a complete OLMo-core experiment config."""
