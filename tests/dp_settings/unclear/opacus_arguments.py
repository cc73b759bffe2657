from opacus import PrivacyEngine

model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=args.sigma, max_grad_norm=args.clip
)
