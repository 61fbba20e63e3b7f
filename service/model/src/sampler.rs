//! The sampler of a request, for models of which several fit.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How noise is removed from step to step, for models that were trained to remove it in many small ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampler {
    /// Steps of the first order (Karras et al. 2022, "Elucidating the Design Space of Diffusion-Based Generative Models").
    Euler,
    /// The same, with new noise in every step.
    EulerAncestral,
    /// DPM-Solver++ of the second order over two steps (Lu et al. 2022), over the noise levels of Karras et al.
    #[serde(rename = "dpmpp_2m_karras")]
    Dpmpp2mKarras,
}

impl Sampler {
    /// All samplers.
    pub const ALL: [Sampler; 3] = [Sampler::Euler, Sampler::EulerAncestral, Sampler::Dpmpp2mKarras];

    /// The sampler's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Sampler::Euler => "euler",
            Sampler::EulerAncestral => "euler_ancestral",
            Sampler::Dpmpp2mKarras => "dpmpp_2m_karras",
        }
    }
}

impl fmt::Display for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Sampler {
    type Err = String;

    fn from_str(name: &str) -> Result<Sampler, String> {
        let known = Sampler::ALL.into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| {
            let known = Sampler::ALL.map(Sampler::name).join(", ");
            format!("is {name:?}; the samplers are {known}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sampler_has_one_name() {
        for sampler in Sampler::ALL {
            assert_eq!(sampler.name().parse(), Ok(sampler));
            let written = serde_json::to_value(sampler).expect("a name");
            assert_eq!(written, sampler.name());
        }
        let refused = "heun".parse::<Sampler>().expect_err("no sampler");
        assert!(refused.contains("dpmpp_2m_karras"), "{refused}");
    }
}
