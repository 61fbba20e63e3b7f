//! `unet/config.json`.

use serde::Deserialize;

use crate::files::check_sizes;

/// Channels of a latent, and of what the UNet predicts.
pub(super) const LATENT_CHANNELS: usize = 4;

/// Channels of the input of an inpainting UNet: the latent, the mask, and the latent of the masked picture.
const INPAINT_CHANNELS: usize = 2 * LATENT_CHANNELS + 1;

/// Numbers of a request that are embedded beside the pooled state of the text: the original size, the crop, and the size.
pub(super) const TIME_IDS: usize = 6;

/// One number for all resolutions, or one for each.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum PerLevel {
    One(usize),
    Each(Vec<usize>),
}

impl PerLevel {
    /// The number of a resolution.
    fn at(&self, level: usize) -> usize {
        match self {
            PerLevel::One(number) => *number,
            PerLevel::Each(numbers) => numbers.get(level).copied().unwrap_or_default(),
        }
    }

    fn fits(&self, levels: usize) -> bool {
        match self {
            PerLevel::One(_) => true,
            PerLevel::Each(numbers) => numbers.len() == levels,
        }
    }
}

/// Configuration of the UNet, diffusers' `UNet2DConditionModel`. Missing fields have the values of the published SDXL, of which
/// other classes of UNets differ in the fields that [`UnetConfig::check`] refuses.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct UnetConfig {
    /// 4, or 9 for inpainting: latent, mask, and the masked picture's latent.
    pub in_channels: usize,
    /// Must be 4.
    pub out_channels: usize,
    /// Types of the resolutions, the finest first: `DownBlock2D` without attention, or `CrossAttnDownBlock2D`.
    pub down_block_types: Vec<String>,
    /// Types of the resolutions, the coarsest first: `CrossAttnUpBlock2D` or `UpBlock2D`.
    pub up_block_types: Vec<String>,
    /// Type of the middle; only `UNetMidBlock2DCrossAttn` is supported.
    pub mid_block_type: Option<String>,
    /// Channels at each resolution, the finest first.
    pub block_out_channels: Vec<usize>,
    /// Residual blocks of each resolution on the way down; the way up has one more.
    pub layers_per_block: usize,
    /// Layers of each attention.
    pub transformer_layers_per_block: PerLevel,
    /// Heads of attention (not their width: the field's name in diffusers is a known mistake).
    pub attention_head_dim: PerLevel,
    /// The same under its own name, where a configuration has it.
    pub num_attention_heads: Option<PerLevel>,
    /// Width of the text's states.
    pub cross_attention_dim: usize,
    pub norm_num_groups: usize,
    /// Epsilon of the group norms of residual blocks.
    pub norm_eps: f64,
    /// Must be true.
    pub use_linear_projection: bool,
    /// Must be `text_time`.
    pub addition_embed_type: Option<String>,
    /// Width of the embedding of each of six numbers.
    pub addition_time_embed_dim: usize,
    /// Width of the pooled state and of these embeddings together.
    pub projection_class_embeddings_input_dim: usize,
    /// Must be `silu`.
    pub act_fn: String,
    /// Must be true.
    pub flip_sin_to_cos: bool,
    /// Must be 0.
    pub freq_shift: f64,
    /// Must be `default`.
    pub resnet_time_scale_shift: String,
    /// Must be `positional`.
    pub time_embedding_type: String,
    /// Not supported: a second kind of conditioning on the guidance, as in LCM.
    pub time_cond_proj_dim: Option<usize>,
    /// Not supported.
    pub class_embed_type: Option<String>,
    /// Not supported.
    pub encoder_hid_dim_type: Option<String>,
    /// Not supported.
    pub only_cross_attention: bool,
    /// Not supported.
    pub dual_cross_attention: bool,
    /// Not supported.
    pub reverse_transformer_layers_per_block: Option<serde_json::Value>,
}

impl Default for UnetConfig {
    fn default() -> UnetConfig {
        let names = |names: [&str; 3]| names.map(str::to_owned).to_vec();
        UnetConfig {
            in_channels: LATENT_CHANNELS,
            out_channels: LATENT_CHANNELS,
            down_block_types: names(["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"]),
            up_block_types: names(["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]),
            mid_block_type: None,
            block_out_channels: vec![320, 640, 1280],
            layers_per_block: 2,
            transformer_layers_per_block: PerLevel::Each(vec![1, 2, 10]),
            attention_head_dim: PerLevel::Each(vec![5, 10, 20]),
            num_attention_heads: None,
            cross_attention_dim: 2048,
            norm_num_groups: 32,
            norm_eps: 1e-5,
            use_linear_projection: true,
            addition_embed_type: Some("text_time".to_owned()),
            addition_time_embed_dim: 256,
            projection_class_embeddings_input_dim: 2816,
            act_fn: "silu".to_owned(),
            flip_sin_to_cos: true,
            freq_shift: 0.0,
            resnet_time_scale_shift: "default".to_owned(),
            time_embedding_type: "positional".to_owned(),
            time_cond_proj_dim: None,
            class_embed_type: None,
            encoder_hid_dim_type: None,
            only_cross_attention: false,
            dual_cross_attention: false,
            reverse_transformer_layers_per_block: None,
        }
    }
}

impl UnetConfig {
    /// Number of resolutions.
    pub(super) fn levels(&self) -> usize {
        self.block_out_channels.len()
    }

    /// Channels at the finest resolution.
    pub(super) fn finest(&self) -> usize {
        self.block_out_channels.first().copied().unwrap_or_default()
    }

    /// Heads of the attention at a resolution.
    pub(super) fn heads(&self, level: usize) -> usize {
        let heads = self.num_attention_heads.as_ref();
        heads.unwrap_or(&self.attention_head_dim).at(level)
    }

    /// Layers of each attention at a resolution.
    pub(super) fn depth(&self, level: usize) -> usize {
        self.transformer_layers_per_block.at(level)
    }

    /// Whether a resolution has attention.
    pub(super) fn has_attention(&self, level: usize) -> bool {
        let kind = self.down_block_types.get(level);
        kind.is_some_and(|kind| kind == "CrossAttnDownBlock2D")
    }

    /// Width of the embedding of a time.
    pub(super) fn time_width(&self) -> usize {
        4 * self.finest()
    }

    /// Width of the text's pooled state.
    pub(super) fn pooled_width(&self) -> usize {
        let ids = TIME_IDS * self.addition_time_embed_dim;
        self.projection_class_embeddings_input_dim.saturating_sub(ids)
    }

    /// Whether the mask and the masked picture are inputs.
    pub fn takes_mask(&self) -> bool {
        self.in_channels == INPAINT_CHANNELS
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        self.check_kind()?;
        self.check_widths()
    }

    /// Refuses UNets of another kind than SDXL's.
    fn check_kind(&self) -> Result<(), String> {
        if self.addition_embed_type.as_deref() != Some("text_time") {
            return Err(format!(
                "addition_embed_type is {:?}; text_time is supported, which SDXL has and Stable Diffusion 1 and 2 have not",
                self.addition_embed_type
            ));
        }
        if ![LATENT_CHANNELS, INPAINT_CHANNELS].contains(&self.in_channels)
            || self.out_channels != LATENT_CHANNELS
        {
            return Err(format!(
                "its UNet takes {} channels and gives {}; {LATENT_CHANNELS} (or {INPAINT_CHANNELS} for inpainting) and \
                 {LATENT_CHANNELS} are supported",
                self.in_channels, self.out_channels
            ));
        }
        let settings = [
            ("use_linear_projection", !self.use_linear_projection),
            ("act_fn", self.act_fn != "silu"),
            ("flip_sin_to_cos", !self.flip_sin_to_cos),
            ("freq_shift", self.freq_shift != 0.0),
            (
                "resnet_time_scale_shift",
                self.resnet_time_scale_shift != "default",
            ),
            ("time_embedding_type", self.time_embedding_type != "positional"),
            ("time_cond_proj_dim", self.time_cond_proj_dim.is_some()),
            ("class_embed_type", self.class_embed_type.is_some()),
            ("encoder_hid_dim_type", self.encoder_hid_dim_type.is_some()),
            ("only_cross_attention", self.only_cross_attention),
            ("dual_cross_attention", self.dual_cross_attention),
            (
                "mid_block_type",
                self.mid_block_type
                    .as_deref()
                    .is_some_and(|kind| kind != "UNetMidBlock2DCrossAttn"),
            ),
            (
                "reverse_transformer_layers_per_block",
                self.reverse_transformer_layers_per_block
                    .as_ref()
                    .is_some_and(|value| !value.is_null()),
            ),
        ];
        match settings.into_iter().find(|(_, differs)| *differs) {
            Some((name, _)) => Err(format!(
                "its UNet differs from SDXL's in {name}, which is not supported"
            )),
            None => Ok(()),
        }
    }

    fn check_widths(&self) -> Result<(), String> {
        let levels = self.levels();
        let counts: Vec<usize> = (0..levels)
            .flat_map(|level| [self.depth(level), self.heads(level)])
            .collect();
        check_sizes(&[
            (&self.block_out_channels, 1 << 14),
            (&counts, 1 << 10),
            (
                &[
                    self.cross_attention_dim,
                    self.addition_time_embed_dim,
                    self.projection_class_embeddings_input_dim,
                ],
                1 << 16,
            ),
            (&[self.layers_per_block, levels], 8),
        ])?;
        let up: Vec<bool> = self
            .up_block_types
            .iter()
            .rev()
            .map(|kind| kind == "CrossAttnUpBlock2D")
            .collect();
        let down: Vec<bool> = (0..levels).map(|level| self.has_attention(level)).collect();
        let known = |kind: &String, kinds: [&str; 2]| kinds.contains(&kind.as_str());
        let is_known = self
            .down_block_types
            .iter()
            .all(|kind| known(kind, ["DownBlock2D", "CrossAttnDownBlock2D"]))
            && self
                .up_block_types
                .iter()
                .all(|kind| known(kind, ["UpBlock2D", "CrossAttnUpBlock2D"]));
        let fits = self.transformer_layers_per_block.fits(levels)
            && self.attention_head_dim.fits(levels)
            && self
                .num_attention_heads
                .as_ref()
                .is_none_or(|heads| heads.fits(levels));
        if levels == 0 || !is_known || up != down || self.down_block_types.len() != levels || !fits {
            return Err(format!(
                "resolutions of {:?} down and {:?} up, for {levels} widths; as many of each as widths are supported, with attention \
                 at the same resolutions",
                self.down_block_types, self.up_block_types
            ));
        }
        if self.layers_per_block == 0 {
            return Err("resolutions without residual blocks".to_owned());
        }
        let groups = self.norm_num_groups;
        for (level, &width) in self.block_out_channels.iter().enumerate() {
            if groups == 0 || width == 0 || !width.is_multiple_of(groups) {
                return Err(format!("{width} channels in {groups} groups"));
            }
            let (heads, depth) = (self.heads(level), self.depth(level));
            // The middle has the attention of the coarsest resolution.
            let attends = self.has_attention(level) || level + 1 == levels;
            if attends && (heads == 0 || depth == 0 || !width.is_multiple_of(heads)) {
                return Err(format!("{width} channels in {heads} heads and {depth} layers"));
            }
        }
        if !self.finest().is_multiple_of(2) || !self.addition_time_embed_dim.is_multiple_of(2) {
            return Err("embeddings of times of odd width".to_owned());
        }
        if self.pooled_width() == 0 || self.cross_attention_dim == 0 {
            return Err(format!(
                "projection_class_embeddings_input_dim is {}, of which {TIME_IDS} times {} are of numbers: nothing is left for the text",
                self.projection_class_embeddings_input_dim, self.addition_time_embed_dim
            ));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps.is_finite()) {
            return Err(format!("norm_eps is {}", self.norm_eps));
        }
        Ok(())
    }
}
