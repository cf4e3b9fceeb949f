"""Many runs of one study: what each trains, where it is trained, and what of it is kept."""
