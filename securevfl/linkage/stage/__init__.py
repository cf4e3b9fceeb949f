"""The linking stage of a run: every party's keys in, ranked candidates at each secondary out."""
