//! The models, and their marks.

use super::Relative;

/// A relative without classes and architectures.
const fn marked(name: &'static str, marks: &'static [&'static [&'static str]]) -> Relative {
    Relative {
        name,
        classes: &[],
        architectures: &[],
        marks,
    }
}

/// A LoRA.
pub(super) const LORA: Relative = marked(
    "a LoRA, which is used with a model: put it in a folder of adapters and name it with --lora",
    &[
        &[".lora_A."],
        &[".lora_B."],
        &[".lora_down."],
        &[".lora_up."],
        &["lora.down."],
        &[".lokr_w"],
        &[".hada_w"],
        &[".processor.", "_lora"],
    ],
);

/// Whole models, and files that are no models; the first that fits counts.
pub(super) const RELATIVES: [Relative; 42] = [
    LORA,
    Relative {
        name: "a ControlNet, which is used with a model: of FLUX.1 its folder in diffusers' layout is read",
        classes: &[],
        architectures: &[],
        marks: &[
            &["controlnet_blocks."],
            &["controlnet_x_embedder."],
            &["controlnet_cond_embedding."],
            &["control_model."],
            &["zero_convs.0."],
            &["input_hint_block."],
            &["control_layers.0."],
        ],
    },
    marked(
        "an IP-Adapter",
        &[&["ip_adapter."], &["image_proj.", "to_k_ip"], &["ip_adapter_"]],
    ),
    marked("a textual inversion", &[&["emb_params"], &["string_to_param"]]),
    Relative {
        name: "FLUX.1 Redux",
        classes: &["FluxPriorRedux", "ReduxImageEncoder"],
        architectures: &[],
        marks: &[&["redux_up.", "redux_down."]],
    },
    Relative {
        name: "FLUX.2 dev, of which klein runs here",
        classes: &[
            "Flux2Pipeline",
            "Flux2ImageToImage",
            "Flux2Modular",
            "Flux2KleinKV",
        ],
        architectures: &[],
        marks: &[
            &["double_stream_modulation_img.", "guidance_in."],
            &["double_stream_modulation_img.", "guidance_embedder."],
        ],
    },
    Relative {
        name: "Chroma",
        classes: &["Chroma"],
        architectures: &["chroma"],
        marks: &[&["distilled_guidance_layer."]],
    },
    Relative {
        name: "Ovis-Image",
        classes: &["Ovis"],
        architectures: &[],
        marks: &[&["double_blocks.0.img_mlp.down_proj."]],
    },
    Relative {
        name: "HunyuanVideo 1.5 or HunyuanImage 2.1",
        classes: &["HunyuanVideo15", "HunyuanImage"],
        architectures: &[],
        marks: &[&["byt5_in."], &["context_embedder_2."]],
    },
    Relative {
        name: "HunyuanDiT",
        classes: &["HunyuanDiT", "HunyuanDiT2D"],
        architectures: &[],
        marks: &[&["text_embedding_padding"]],
    },
    Relative {
        name: "OmniGen",
        classes: &["OmniGen"],
        architectures: &["omnigen"],
        marks: &[&["llm.layers.0.self_attn.qkv_proj."], &["ref_image_refiner."]],
    },
    Relative {
        name: "Lumina Image 2",
        classes: &["Lumina"],
        architectures: &[],
        marks: &[&["noise_refiner.0.adaLN_modulation.1."], &["time_caption_embed."]],
    },
    Relative {
        name: "Qwen-Image-Layered, of which Qwen-Image and Qwen-Image-Edit run here",
        classes: &["QwenImageLayered"],
        architectures: &[],
        marks: &[&["time_text_embed.addition_t_embedding.", "img_mod.1."]],
    },
    Relative {
        name: "Qwen-Image 2.1, of which versions 1 run here",
        classes: &["QwenImage21"],
        architectures: &[],
        marks: &[&["transformer_blocks.0.img_mlp.gate_layer.", "txt_in.in_layer."]],
    },
    Relative {
        name: "a ControlNet of Qwen-Image",
        classes: &["QwenImageControlNet"],
        architectures: &[],
        marks: &[],
    },
    Relative {
        name: "Stable Diffusion 3",
        classes: &["StableDiffusion3", "SD3"],
        architectures: &["sd3"],
        marks: &[
            &["joint_blocks.0.context_block."],
            &["pos_embed.proj.", "transformer_blocks.0.norm1_context."],
        ],
    },
    Relative {
        name: "AuraFlow",
        classes: &["AuraFlow"],
        architectures: &["aura", "auraflow"],
        marks: &[
            &["double_layers.0.attn.w1q."],
            &["joint_transformer_blocks.0.", "register_tokens"],
        ],
    },
    Relative {
        name: "Anima",
        classes: &["Anima"],
        architectures: &["anima"],
        marks: &[&["llm_adapter."]],
    },
    Relative {
        name: "Cosmos",
        classes: &["Cosmos"],
        architectures: &["cosmos"],
        marks: &[
            &["blocks.block0.blocks.0."],
            &["blocks.0.adaln_modulation_self_attn."],
            &["time_embed.t_embedder.", "norm_out.linear_1."],
        ],
    },
    Relative {
        name: "HiDream",
        classes: &["HiDream"],
        architectures: &["hidream"],
        marks: &[&["double_stream_blocks.0.block."]],
    },
    Relative {
        name: "Mochi",
        classes: &["Mochi"],
        architectures: &["mochi"],
        marks: &[&["t5_y_embedder."], &["blocks.0.attn.qkv_x."]],
    },
    Relative {
        name: "SANA",
        classes: &["Sana"],
        architectures: &["sana"],
        marks: &[&["mlp.inverted_conv."], &["ff.conv_inverted."]],
    },
    Relative {
        name: "LTX-Video",
        classes: &["LTX"],
        architectures: &["ltxv"],
        marks: &[
            &["patchify_proj."],
            &["transformer_blocks.0.scale_shift_table", "time_embed.emb."],
        ],
    },
    Relative {
        name: "PixArt",
        classes: &["PixArt"],
        architectures: &["pixart"],
        marks: &[
            &["t_block.1.", "y_embedder.y_proj."],
            &["adaln_single.", "pos_embed.proj."],
        ],
    },
    Relative {
        name: "CogVideoX or CogView",
        classes: &["CogVideoX", "CogView"],
        architectures: &["cogvideox"],
        marks: &[&["patch_embed.text_proj."], &["mixins.patch_embed."]],
    },
    Relative {
        name: "Kandinsky 5",
        classes: &["Kandinsky"],
        architectures: &[],
        marks: &[&["visual_transformer_blocks.0."], &["text_transformer_blocks.0."]],
    },
    Relative {
        name: "Wan 2.1's picture to film, which sees the picture through CLIP",
        classes: &[],
        architectures: &[],
        marks: &[
            &["blocks.0.cross_attn.k_img."],
            &["condition_embedder.image_embedder.", "blocks.0.attn2."],
        ],
    },
    Relative {
        name: "another kind of Wan, with control, speech or animation",
        classes: &["WanVACE", "WanAnimate", "WanS2V", "VaceWan", "WanModel_S2V"],
        architectures: &[],
        marks: &[
            &["vace_blocks.0.", "vace_patch_embedding."],
            &["patch_embedding.", "casual_audio_encoder."],
            &["patch_embedding.", "face_adapter."],
            &["patch_embedding.", "control_adapter."],
            &["patch_embedding.", "ref_conv."],
        ],
    },
    Relative {
        name: "Stable Cascade",
        classes: &["StableCascade", "Wuerstchen"],
        architectures: &[],
        marks: &[&["clip_txt_pooled_mapper."], &["effnet_mapper."]],
    },
    Relative {
        name: "ACE-Step 1, of which version 1.5 runs here",
        classes: &["ACEStepTransformer2DModel"],
        architectures: &[],
        marks: &[&["genre_embedder.", "lyric_embs."]],
    },
    Relative {
        name: "Stable Audio",
        classes: &["StableAudio"],
        architectures: &[],
        marks: &[&["pretransform.model."]],
    },
    Relative {
        name: "Kolors",
        classes: &["Kolors"],
        architectures: &[],
        marks: &[&["encoder_hid_proj.", "add_embedding.linear_1."]],
    },
    Relative {
        name: "Stable Video Diffusion",
        classes: &["StableVideoDiffusion", "UNetSpatioTemporal"],
        architectures: &[],
        marks: &[&[".time_stack."], &["temporal_transformer_blocks.0."]],
    },
    marked("AnimateDiff", &[&["motion_modules.0."]]),
    Relative {
        name: "the refiner of Stable Diffusion XL, of which the base model runs here",
        classes: &[],
        architectures: &[],
        marks: &[&["conditioner.embedders.0.model."]],
    },
    Relative {
        name: "another kind of Stable Diffusion XL, with control or instructions",
        classes: &[
            "StableDiffusionXLAdapter",
            "StableDiffusionXLControl",
            "StableDiffusionXLInstruct",
            "StableDiffusionXLKDiffusion",
            "StableDiffusionXLPAG",
        ],
        architectures: &[],
        marks: &[],
    },
    Relative {
        name: "Stable Diffusion 1 or 2",
        classes: &[
            "AltDiffusion",
            "StableDiffusionAdapter",
            "StableDiffusionControl",
            "StableDiffusionDepth",
            "StableDiffusionDiffEdit",
            "StableDiffusionGLIGEN",
            "StableDiffusionImageVariation",
            "StableDiffusionImg2Img",
            "StableDiffusionInpaint",
            "StableDiffusionInstruct",
            "StableDiffusionKDiffusion",
            "StableDiffusionLDM3D",
            "StableDiffusionLatentUpscale",
            "StableDiffusionPAG",
            "StableDiffusionPanorama",
            "StableDiffusionPipeline",
            "StableDiffusionSAG",
            "StableDiffusionUpscale",
        ],
        architectures: &["sd1"],
        marks: &[
            // Attention at the finest resolution, which SDXL has not.
            &["input_blocks.0.0.", "input_blocks.1.1."],
            &[
                "down_blocks.0.resnets.0.time_emb_proj.",
                "down_blocks.0.attentions.0.",
            ],
            &["cond_stage_model."],
        ],
    },
    Relative {
        name: "the UNet of a Stable Diffusion",
        classes: &["UNet2DCondition"],
        architectures: &[],
        marks: &[],
    },
    Relative {
        name: "FLUX.3",
        classes: &["Flux3"],
        architectures: &["flux3"],
        marks: &[],
    },
    Relative {
        name: "Krea 2",
        classes: &["Krea"],
        architectures: &[],
        marks: &[],
    },
    Relative {
        name: "Allegro, EasyAnimate, Latte or another model of films",
        classes: &["Allegro", "EasyAnimate", "Latte", "SkyReels", "ConsisID"],
        architectures: &[],
        marks: &[],
    },
    marked(
        "an upscaler (ESRGAN or the like)",
        &[
            &["RRDB_trunk."],
            &["rdb1.conv1."],
            &["RDB1.conv1."],
            &["residual_group.blocks.0."],
            &["upsampler.0.", "layers.0.residual_group"],
        ],
    ),
];

/// Parts of models that are published as separate files.
pub(super) const PARTS: [Relative; 6] = [
    Relative {
        name: "the autoencoder (VAE) of a model: name the file of the model itself",
        classes: &["Autoencoder", "AsymmetricAutoencoder"],
        architectures: &[],
        marks: &[
            &["decoder.mid.block_1."],
            &["decoder.mid_block."],
            &["decoder.middle.0.residual."],
            &["decoder.block.0.snake1."],
            &["decoder.conv_in.", "encoder.conv_in."],
        ],
    },
    Relative {
        name: "the text encoder (T5) of a model: name the file of the model itself",
        classes: &[],
        architectures: &["t5", "t5encoder"],
        marks: &[
            &["block.0.layer.0.SelfAttention.q."],
            &["token_embedding.", "blocks.0.ffn.gate.0."],
        ],
    },
    marked(
        "a picture encoder (CLIP or SigLIP) of a model: name the file of the model itself",
        &[
            &["vision_model.encoder.layers.0."],
            &["visual.transformer.resblocks.0."],
        ],
    ),
    marked(
        "the text encoder (CLIP) of a model: name the file of the model itself",
        &[
            &["text_model.encoder.layers.0."],
            &["transformer.resblocks.0."],
            &["token_embedding.", "positional_embedding"],
        ],
    ),
    Relative {
        name: "a language model (such as Qwen or LLaMA), of which models have one as text encoder: name the file of the \
               model itself",
        classes: &[],
        architectures: &[
            "llama", "qwen2", "qwen2vl", "qwen3", "qwen3vl", "gemma2", "gemma3", "mistral3", "clip", "phi3",
        ],
        marks: &[
            &["layers.0.self_attn.q_proj.", "layers.0.mlp.gate_proj."],
            &["blk.0.attn_q.", "token_embd."],
        ],
    },
    marked(
        "a model of depth, faces or segments",
        &[
            &["pretrained.blocks.0.", "depth_head."],
            &["image_encoder.blocks.0.", "mask_decoder."],
        ],
    ),
];
