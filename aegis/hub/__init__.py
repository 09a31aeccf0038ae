"""Models on the Hugging Face hub: found in the caches, or described and downloaded.

``huggingface_hub`` is loaded by a worker process only: what it takes in memory and in time to
import is not this process's.
"""
