"""The run-time side of Odin: Shadow Graph, staging, publication, messages. Imports no nerfstudio."""
