"""The named recipes: one YAML file each, read through ``nvfp4_train.load_recipe``."""
