//! Models that people have and that do not run here. They are recognized by their tensors' names, by the class of their
//! configuration, or by the architecture that a GGUF file names, and refused by name. Several have names that begin like those
//! of a model that runs.

mod table;

use gpu::CheckpointFile;

use table::{LORA, PARTS, RELATIVES};

/// A model that does not run here.
struct Relative {
    /// For display, after "it is".
    name: &'static str,
    /// Beginnings of the classes of its pipelines and transformers.
    classes: &'static [&'static str],
    /// Architectures of its GGUF files, except those that a model that runs here uses too.
    architectures: &'static [&'static str],
    /// Parts of tensors' names: a file with all parts of one set holds this model.
    marks: &'static [&'static [&'static str]],
}

impl Relative {
    fn has_class(&self, class: &str) -> bool {
        self.classes.iter().any(|beginning| class.starts_with(beginning))
    }

    fn has_marks(&self, names: &[&str]) -> bool {
        let is_there = |mark: &&str| names.iter().any(|name| name.contains(mark));
        self.marks.iter().any(|set| set.iter().all(is_there))
    }
}

/// The model with a pipeline or transformer of this class, if it is known here.
pub(crate) fn class_not_run(class: &str) -> Option<&'static str> {
    let mut all = RELATIVES.iter().chain(&PARTS);
    all.find(|relative| relative.has_class(class))
        .map(|relative| relative.name)
}

/// The model in a single file, if it is known and does not run.
pub(crate) fn file_not_run(file: &CheckpointFile) -> Option<&'static str> {
    in_file(file, &RELATIVES)
}

/// The part of a model that a single file has, if it is known.
pub(crate) fn part_in_file(file: &CheckpointFile) -> Option<&'static str> {
    in_file(file, &PARTS)
}

/// Whether tensors of these names are those of a LoRA.
pub(crate) fn is_lora(names: &[&str]) -> bool {
    LORA.has_marks(names)
}

/// The known model whose tensors have these names.
pub(crate) fn known_by_names(names: &[&str]) -> Option<&'static str> {
    let mut all = RELATIVES.iter().chain(&PARTS);
    all.find(|relative| relative.has_marks(names))
        .map(|relative| relative.name)
}

fn in_file(file: &CheckpointFile, relatives: &[Relative]) -> Option<&'static str> {
    let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
    let architecture = file.metadata().get("general.architecture").map(String::as_str);
    let is_it = |relative: &&Relative| {
        relative.has_marks(&names)
            || architecture.is_some_and(|named| relative.architectures.contains(&named))
    };
    relatives.iter().find(is_it).map(|relative| relative.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relatives_are_known_by_their_tensors() {
        for (name, tensors) in [
            (
                "FLUX.2",
                &[
                    "double_blocks.0.img_attn.qkv.weight",
                    "double_stream_modulation_img.lin.weight",
                    "guidance_in.in_layer.weight",
                ][..],
            ),
            (
                "Chroma",
                &[
                    "distilled_guidance_layer.in_proj.weight",
                    "double_blocks.0.img_attn.qkv.weight",
                ],
            ),
            (
                "Lumina",
                &[
                    "noise_refiner.0.attention.qkv.weight",
                    "noise_refiner.0.adaLN_modulation.1.weight",
                ],
            ),
            (
                "refiner",
                &[
                    "conditioner.embedders.0.model.transformer.resblocks.0.ln_1.weight",
                    "model.diffusion_model.label_emb.0.0.weight",
                ],
            ),
            (
                "Stable Diffusion 1",
                &[
                    "model.diffusion_model.input_blocks.0.0.weight",
                    "model.diffusion_model.input_blocks.1.1.proj_in.weight",
                ],
            ),
            (
                "CLIP",
                &[
                    "patch_embedding.weight",
                    "text_embedding.0.weight",
                    "blocks.0.cross_attn.k_img.weight",
                ],
            ),
            (
                "another kind of Wan",
                &["vace_blocks.0.before_proj.weight", "vace_patch_embedding.weight"],
            ),
            (
                "Qwen-Image-Layered",
                &[
                    "txt_norm.weight",
                    "transformer_blocks.0.img_mod.1.weight",
                    "time_text_embed.addition_t_embedding.weight",
                ],
            ),
            (
                "Qwen-Image 2.1",
                &[
                    "txt_in.in_layer.weight",
                    "modulation.1.weight",
                    "transformer_blocks.0.img_mlp.gate_layer.weight",
                ],
            ),
            (
                "HunyuanVideo 1.5",
                &["byt5_in.fc1.weight", "double_blocks.0.img_attn_qkv.weight"],
            ),
            (
                "a LoRA",
                &["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"],
            ),
            (
                "ControlNet",
                &[
                    "controlnet_blocks.0.weight",
                    "transformer_blocks.0.attn.to_q.weight",
                ],
            ),
            (
                "Ovis-Image",
                &[
                    "double_blocks.0.img_mlp.down_proj.weight",
                    "double_blocks.0.img_attn.qkv.weight",
                ],
            ),
            (
                "OmniGen",
                &[
                    "time_caption_embed.linear_1.weight",
                    "ref_image_refiner.0.norm1.weight",
                ],
            ),
            ("VAE", &["decoder.mid.block_1.conv1.weight"]),
            ("T5", &["encoder.block.0.layer.0.SelfAttention.q.weight"]),
            ("upscaler", &["body.0.rdb1.conv1.weight"]),
        ] {
            let found = known_by_names(tensors).unwrap_or_default();
            assert!(found.contains(name), "{name}: {found:?}");
        }
    }

    #[test]
    fn no_model_that_runs_is_taken_for_a_relative() {
        for tensors in [
            &[
                "double_blocks.0.img_attn.qkv.weight",
                "single_blocks.0.linear1.weight",
                "vae.decoder.mid.block_1.conv1.weight",
            ][..],
            &[
                "transformer_blocks.0.norm1_context.linear.weight",
                "x_embedder.weight",
            ],
            &[
                "noise_refiner.0.attention.qkv.weight",
                "noise_refiner.0.adaLN_modulation.0.weight",
                "x_pad_token",
            ],
            &[
                "txt_norm.weight",
                "transformer_blocks.0.img_mod.1.weight",
                "__index_timestep_zero__",
            ],
            &[
                "txt_in.individual_token_refiner.blocks.0.self_attn.qkv.weight",
                "double_blocks.0.img_attn.qkv.weight",
            ],
            &[
                "model.diffusion_model.input_blocks.0.0.weight",
                "model.diffusion_model.input_blocks.1.0.in_layers.0.weight",
                "model.diffusion_model.label_emb.0.0.weight",
                "conditioner.embedders.0.transformer.text_model.embeddings.position_ids",
                "conditioner.embedders.1.model.transformer.resblocks.0.ln_1.weight",
            ],
            &[
                "down_blocks.0.resnets.0.time_emb_proj.weight",
                "down_blocks.1.attentions.0.norm.weight",
                "add_embedding.linear_1.weight",
            ],
            &[
                "patch_embedding.weight",
                "text_embedding.0.weight",
                "blocks.0.cross_attn.k.weight",
            ],
            &[
                "patch_embedding.weight",
                "condition_embedder.time_proj.weight",
                "blocks.0.attn2.to_k.weight",
            ],
            &[
                "decoder.layers.0.self_attn.q_proj.weight",
                "encoder.lyric_encoder.norm.weight",
                "null_condition_emb",
            ],
        ] {
            let found = RELATIVES.iter().find(|relative| relative.has_marks(tensors));
            assert_eq!(found.map(|relative| relative.name), None, "{tensors:?}");
        }
        for class in crate::Families::pipelines(&crate::families()) {
            let found = class_not_run(class);
            assert!(found.is_none(), "{class}: {found:?}");
        }
    }
}
