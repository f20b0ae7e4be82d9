"""Train encoders whose features an operator acts on."""
