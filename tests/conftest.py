"""What holds for every test: one thread in each process, set before anything imports torch."""

import os

# Tests run side by side and start parties as processes of their own, which inherit this: with
# several threads in each they would fight for the same cores.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
