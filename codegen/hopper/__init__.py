"""Lowering to sm_90a: tiles come by TMA from a warp that does nothing else, warpgroups multiply them with wgmma."""
