"""Networks up to what their function does not know: matching, merging, canonical form, freedom of representations."""
