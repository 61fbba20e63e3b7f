//! HunyuanVideo's text encoder and FramePack's encoder of pictures.

use candle_core::{DType, Device, Tensor};
use pipelines::text::llama::{LlamaConfig, LlamaEncoder};
use pipelines::text::tokenizers::TemplatedIds;
use pipelines::vision::siglip::{SiglipConfig, SiglipEncoder};

use crate::{alone, assert_close, made_up, peak_of};

#[test]
fn encoders_allocate_the_predicted_bytes() {
    let _alone = alone();
    let json = r#"{"vocab_size": 400, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "rope_theta": 500000.0}"#;
    let config: LlamaConfig = serde_json::from_str(json).expect("a configuration");
    let tensors = made_up(config.tensor_shapes(&|_| false));
    let encoder = LlamaEncoder::new(&config, "text_encoder", &tensors).expect("an encoder");
    for tokens in [96, 351] {
        let ids = (0..tokens as u32).map(|i| i * 7 % 400).collect();
        let prompt = TemplatedIds { ids, head: 95 };
        let taken = peak_of(|| encoder.forward(&prompt, &|| false).expect("an encoding"));
        let predicted = config.scratch(tokens, DType::F32).0;
        assert_close(&format!("{tokens} tokens"), taken, predicted);
    }

    for (side, patch) in [(224, 16), (384, 14)] {
        let json = format!(
            r#"{{"hidden_size": 256, "intermediate_size": 960, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": {side}, "patch_size": {patch}}}"#
        );
        let config: SiglipConfig = serde_json::from_str(&json).expect("a configuration");
        let tensors = made_up(config.tensor_shapes(&|_| false));
        let encoder = SiglipEncoder::new(&config, "image_encoder", &tensors).expect("an encoder");
        let pixels = Tensor::zeros((1, 3, side, side), DType::F32, &Device::Cpu).expect("pixels");
        let taken = peak_of(|| encoder.forward(&pixels, &|| false).expect("an encoding"));
        assert_close(
            &format!("a picture of {side}"),
            taken,
            config.scratch(DType::F32).0,
        );
    }
}
