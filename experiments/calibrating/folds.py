"""Which published Megatron runs a calibration is fitted to: numbers of GPUs times layers."""

FOLDS = "2x16,4x24,8x12,512x48"
