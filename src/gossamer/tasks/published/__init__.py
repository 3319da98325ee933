"""Further problems that papers train: sparse features, recurrent networks, VGG, ImageNet."""
