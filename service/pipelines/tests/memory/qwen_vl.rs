//! Qwen2.5-VL's language model and its vision tower.

use candle_core::{DType, Device, Tensor};
use pipelines::text::qwen2_vl::{Qwen2VlConfig, Qwen2VlEncoder, Template};
use pipelines::text::tokenizers::QwenTokenizer;
use pipelines::vision::qwen2_vl::{Grid, QwenVisionConfig, QwenVisionTower};

use crate::{alone, assert_close, made_up, peak_of};

const VISION: &str = r#"{"depth": 4, "hidden_size": 320, "intermediate_size": 860, "num_heads": 4, "out_hidden_size": 512,
    "fullatt_block_indexes": [1]}"#;

#[test]
fn a_language_models_peak_is_predicted() {
    let _alone = alone();
    let json = format!(
        r#"{{"text_config": {{"vocab_size": 400, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2}}, "vision_config": {VISION}}}"#
    );
    let config: Qwen2VlConfig = serde_json::from_str(&json).expect("a configuration");
    let tensors = made_up(config.tensor_shapes(&|_| false));
    let encoder = Qwen2VlEncoder::new(&config, "text_encoder", &tensors).expect("an encoder");
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/qwen-vl-tiny/tokenizer");
    let tokenizer = QwenTokenizer::open(&folder).expect("a tokenizer");
    for grids in [
        &[][..],
        &[Grid {
            rows: 22,
            columns: 34,
        }; 2],
    ] {
        let template = match grids {
            [] => Template::Generate,
            _ => Template::EditPlus,
        };
        let prompt = template
            .encode(&tokenizer, "a red circle", grids, usize::MAX)
            .expect("tokens");
        let rows =
            |grid: &Grid| Tensor::zeros((grid.tokens(), 512), DType::F32, &Device::Cpu).expect("tokens");
        let peak = peak_of(|| {
            let pictures: Vec<Tensor> = grids.iter().map(rows).collect();
            let states = encoder.forward(&prompt, &pictures, &|| false).expect("states");
            (pictures, states)
        });
        let predicted = config.scratch(prompt.ids.len(), prompt.pictured(), DType::F32).0;
        assert_close(&format!("{} tokens", prompt.ids.len()), peak, predicted);
    }
}

#[test]
fn a_vision_towers_peak_is_predicted() {
    let _alone = alone();
    let config: QwenVisionConfig = serde_json::from_str(VISION).expect("a configuration");
    let tensors = made_up(config.tensor_shapes());
    let tower = QwenVisionTower::new(&config, "vision", &tensors).expect("a tower");
    for (rows, columns) in [(8, 12), (28, 28), (54, 94)] {
        let grid = Grid { rows, columns };
        let patches = Tensor::zeros((grid.patches(), 588), DType::F32, &Device::Cpu).expect("patches");
        let peak = peak_of(|| tower.forward(&patches, grid, &|| false).expect("tokens"));
        let predicted = config.scratch(grid, DType::F32).0;
        assert_close(&format!("{rows} by {columns} patches"), peak, predicted);
    }
}
