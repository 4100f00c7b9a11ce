"""The grids that come with nestpipe: a YAML file each, named after its purpose."""
