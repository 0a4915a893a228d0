"""The registered methods, one file each; installed as ``odin_nerfstudio.method_configs``."""
