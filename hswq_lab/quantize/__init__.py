"""From a 16-bit model to a calibrated hybrid pack: sensitivity, plan, pack, calibrate."""
