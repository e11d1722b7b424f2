"""Times of single phases of a step, on random models with the shapes that they depend on."""
