"""Sharded primitives: each has one owner, which projects it for every view and gets its splat's gradient back."""
