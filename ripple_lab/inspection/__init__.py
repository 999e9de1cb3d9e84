"""Looking into models: what a patch attends to, on a page, in pictures and in numbers."""
