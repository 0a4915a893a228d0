"""Where Odin plugs into nerfstudio: model, pipeline, data manager, trainer, and the compatibility patches."""
