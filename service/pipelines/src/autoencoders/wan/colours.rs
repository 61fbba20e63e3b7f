//! A linear map from latent to colour: previews of a sampling without a decode. Colours are rough.

use super::config::WanVaeConfig;

/// Linear maps from the channels of a latent in the transformer's scale to red, green and blue of -1 to 1, and the colour of a
/// latent of zeros, as stable-diffusion.cpp publishes them (`latent-preview.h`, MIT).
const OF_16: [[f64; 3]; 16] = [
    [0.0151, -0.1484, 0.4798],
    [0.0037, -0.0107, -0.0371],
    [0.2123, 0.0630, 0.0168],
    [0.2330, 0.4065, 0.2201],
    [-0.0519, -0.0824, -0.0694],
    [0.0850, -0.1615, 0.0107],
    [-0.2454, -0.5068, -0.1170],
    [-0.1511, 0.0177, 0.0072],
    [-0.2932, -0.2079, -0.4211],
    [-0.1877, 0.0508, 0.1776],
    [-0.0131, 0.2660, 0.1666],
    [0.0283, 0.1093, 0.1086],
    [-0.2053, 0.0440, 0.1489],
    [0.0143, -0.0486, -0.0072],
    [0.2172, 0.0531, 0.3199],
    [0.1554, 0.0832, 0.0648],
];
const OF_16_ZEROS: [f64; 3] = [-0.2703, -0.2350, -0.4569];
const OF_48: [[f64; 3]; 48] = [
    [0.0171, -0.0272, -0.0193],
    [-0.1137, -0.0287, -0.0229],
    [-0.0001, 0.0215, 0.0046],
    [-0.0133, -0.1071, -0.0336],
    [-0.0004, 0.0003, 0.0259],
    [-0.0142, -0.0040, 0.0405],
    [0.0016, -0.0007, 0.0110],
    [0.0292, -0.0067, 0.0359],
    [0.0216, -0.0159, 0.0405],
    [-0.1020, -0.0702, -0.0289],
    [0.0332, -0.0211, 0.0027],
    [-0.1047, 0.1217, 0.1030],
    [0.0826, -0.0050, 0.0572],
    [-0.0274, 0.0316, 0.0069],
    [-0.0454, 0.0294, 0.0193],
    [-0.0466, -0.0125, 0.0067],
    [0.0747, 0.0337, 0.0253],
    [-0.0083, -0.0027, -0.0070],
    [0.0127, -0.0619, -0.0487],
    [0.0423, -0.0070, 0.0003],
    [-0.0076, -0.0608, -0.0331],
    [0.1599, 0.0456, 0.3675],
    [0.0952, 0.0864, 0.0103],
    [0.0068, 0.0196, 0.0296],
    [0.0035, -0.0107, 0.0143],
    [-0.0997, -0.0663, -0.0062],
    [0.0474, 0.0370, 0.0002],
    [-0.0418, -0.0892, -0.0323],
    [0.0089, 0.0170, 0.0187],
    [-0.0423, 0.0160, 0.0068],
    [0.0113, 0.0365, 0.0374],
    [0.0116, -0.0164, -0.0486],
    [0.0463, -0.0272, 0.0570],
    [0.0096, -0.0176, 0.0303],
    [-0.0458, -0.0361, -0.0106],
    [0.0224, 0.0398, -0.0329],
    [-0.0527, -0.0155, 0.0074],
    [0.1930, 0.2235, 0.2642],
    [-0.0594, -0.0082, 0.0229],
    [-0.1567, -0.2638, -0.0074],
    [-0.0157, 0.0166, 0.0340],
    [0.0380, 0.1098, 0.2004],
    [-0.0008, -0.0096, -0.0081],
    [0.0107, 0.0530, -0.0442],
    [0.0173, 0.0458, 0.0346],
    [0.0094, 0.0131, -0.0017],
    [-0.0248, -0.0594, -0.0338],
    [-0.0783, 0.0291, 0.0261],
];
const OF_48_ZEROS: [f64; 3] = [0.0132, -0.0965, -0.0713];

/// Colours of 0 to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearColours {
    /// The parts of red, green and blue that each channel of a latent in the transformer's scale adds.
    pub weights: Vec<[f64; 3]>,
    /// The colour of a latent of zeros.
    pub of_zeros: [f64; 3],
}

impl WanVaeConfig {
    /// The published map, for the autoencoders that it was made for: those of Wan 2.1 and Wan 2.2, by their latents' scale.
    pub fn colours(&self) -> Option<LinearColours> {
        let is_of = |other: &WanVaeConfig| {
            self.latents_mean == other.latents_mean && self.latents_std == other.latents_std
        };
        let (weights, of_zeros): (&[[f64; 3]], _) = if is_of(&WanVaeConfig::default()) {
            (&OF_16, OF_16_ZEROS)
        } else if is_of(&WanVaeConfig::wan_2_2()) {
            (&OF_48, OF_48_ZEROS)
        } else {
            return None;
        };
        Some(LinearColours {
            weights: weights
                .iter()
                .map(|colour| colour.map(|part| part / 2.0))
                .collect(),
            of_zeros: of_zeros.map(|part| (part + 1.0) / 2.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_channel_of_the_published_autoencoders_has_a_colour_and_others_have_none() {
        for (config, red) in [
            (WanVaeConfig::default(), 0.0151),
            (WanVaeConfig::wan_2_2(), 0.0171),
        ] {
            let colours = config.colours().expect("its own map");
            assert_eq!(colours.weights.len(), config.z_dim);
            assert_eq!(colours.weights[0][0], red / 2.0);
            assert!(colours.of_zeros.iter().all(|part| (0.2..0.6).contains(part)));
        }
        let other = WanVaeConfig {
            latents_std: vec![1.0; 16],
            ..WanVaeConfig::default()
        };
        assert_eq!(other.colours(), None);
    }
}
