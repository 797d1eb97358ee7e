"""Steps of training: gradient and noise, messages to and from neighbours, mixing."""
