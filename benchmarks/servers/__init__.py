"""What a worker or a server of a parameter server runs, over mpidist, plain messages, windows and TensorFlow."""
