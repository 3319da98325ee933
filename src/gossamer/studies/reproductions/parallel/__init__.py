"""Published tables of pipelines and of models divided over machines."""
