# Set-up: fetches the book's code where it is missing, as on Colab; does nothing in a clone of the repository.
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("mr2_core") is None:
    if not os.path.isdir("mr2-book"):
        clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", "v0.1.0"]
        subprocess.run([*clone, "https://github.com/mr2-book/mr2-book"], check=True)
    # Without dependencies: the torch and numpy that are there stay as they are
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "./mr2-book"], check=True)
    importlib.invalidate_caches()
if os.path.isdir("mr2-book/notebooks"):
    os.chdir("mr2-book/notebooks")
