//! Plans for described cards that are not present: which shapes cuDNN supports, and that the on-disk cache works.
//! Nothing is executed. These tests need `libcudnn.so.9`, `libnvrtc.so.13` and a stub `libcuda.so.1`, whose functions
//! may all be empty, in `LD_LIBRARY_PATH`; so they are run by name: `cargo test -p ops without_card -- --ignored
//! --nocapture --test-threads=1`.

use std::time::Instant;

use candle_core::DType;

use super::descriptor::{Descriptor, Value, kind};
use super::plan::CompileTarget;
use super::plans::Folder;
use super::{Ahead, Library, Made, MadeBy, Make, Maker, PlanShape};
use crate::PlansMade;
use crate::planned::{AttentionShape, ConvolutionShape, MaskShape, Planned};

/// A card described to cuDNN.
struct Described {
    capability: u32,
    processors: u32,
    shared: u32,
    threads: u32,
    name: &'static str,
}

const H100: Described = Described {
    capability: 900,
    processors: 132,
    shared: 232_448,
    threads: 2048,
    name: "NVIDIA H100 80GB HBM3",
};
const OTHERS: [Described; 3] = [
    Described {
        capability: 800,
        processors: 108,
        shared: 166_912,
        threads: 2048,
        name: "NVIDIA A100-SXM4-80GB",
    },
    Described {
        capability: 890,
        processors: 128,
        shared: 101_376,
        threads: 1536,
        name: "NVIDIA GeForce RTX 4090",
    },
    Described {
        capability: 1200,
        processors: 170,
        shared: 101_376,
        threads: 1536,
        name: "NVIDIA GeForce RTX 5090",
    },
];
const T4: Described = Described {
    capability: 750,
    processors: 40,
    shared: 65_536,
    threads: 1024,
    name: "Tesla T4",
};

impl Described {
    fn json(&self) -> String {
        let Described {
            capability,
            processors,
            shared,
            threads,
            name,
        } = self;
        format!(
            r#"{{"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
            "multiProcessorCount": {processors}, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": {shared}, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
            "maxCtasPerSM": 24, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": {threads}, "pciDeviceId": 9008,
            "isTccDriver": 0, "supportCoopLaunch": 1, "totalGlobalMem": 85028765696, "smClockRateKHz": 1980000,
            "memClockRateKHz": 2619000, "l2CacheSize": 52428800, "cudaDeviceId": 0, "deviceVer": {capability},
            "driverVer": 13000, "deviceName": "{name}", "memoryBusWidth": 5120}}"#
        )
    }

    fn maker(&self, folder: Option<Folder>) -> Maker {
        let library = Library::get().expect("a libcudnn.so.9 on LD_LIBRARY_PATH");
        let properties = Descriptor::new(library, kind::DEVICE_PROPERTIES).unwrap();
        properties.set(2702, Value::Text(self.json().as_bytes())).unwrap();
        properties.finalise().unwrap();
        Maker {
            library,
            target: CompileTarget::Described(properties),
            card: format!("sm_{} {}", self.capability, self.name),
            folder,
            code_loader: None,
        }
    }
}

/// Contiguous heads: strides of `[batch, token, head]`.
fn side_by_side(tokens: usize, heads: usize, width: usize) -> [usize; 3] {
    [tokens * heads * width, heads * width, width]
}

fn attention(batch: usize, heads: [usize; 2], tokens: [usize; 2], width: usize) -> AttentionShape {
    let ([heads, heads_kv], [queries, keys]) = (heads, tokens);
    let of_keys = side_by_side(keys, heads_kv, width);
    AttentionShape {
        batch,
        heads,
        heads_kv,
        queries,
        keys,
        width,
        dtype: DType::BF16,
        q: side_by_side(queries, heads, width),
        k: of_keys,
        v: of_keys,
        out: side_by_side(queries, heads, width),
        mask: MaskShape::None,
        log_sums: false,
        in_fp8: false,
    }
}

fn flux() -> AttentionShape {
    attention(1, [24, 24], [4608, 4608], 128)
}

fn attentions() -> Vec<(&'static str, AttentionShape)> {
    let window = |before, after| AttentionShape {
        mask: MaskShape::Window { before, after },
        ..attention(1, [16, 8], [1500, 1500], 128)
    };
    let joint = [4608 * 9216, 9216, 128];
    let masked = |mask, shape| AttentionShape { mask, ..shape };
    let t5 = || attention(1, [64, 64], [512, 512], 64);
    let mut shapes = vec![
        ("FLUX.1", flux()),
        (
            "FLUX.1 in its joint buffers",
            AttentionShape {
                q: joint,
                k: joint,
                v: joint,
                out: [4608 * 15360, 15360, 128],
                ..flux()
            },
        ),
        (
            "f16",
            AttentionShape {
                dtype: DType::F16,
                ..flux()
            },
        ),
        ("batch of 4", attention(4, [24, 24], [4608, 4608], 128)),
        ("4173 tokens", attention(1, [24, 24], [4173, 4173], 128)),
        ("cross, 77 keys", attention(1, [24, 24], [4608, 77], 128)),
        ("32 heads share 8", attention(1, [32, 8], [512, 512], 128)),
        ("16 heads share 8", attention(1, [16, 8], [1500, 1500], 128)),
        ("one wide head", attention(1, [1, 1], [16384, 16384], 512)),
        ("T5", masked(MaskShape::bias([1, 64, 512, 512]), t5())),
        (
            "T5, batch of 2",
            masked(
                MaskShape::bias([1, 64, 512, 512]),
                attention(2, [64, 64], [512, 512], 64),
            ),
        ),
        (
            "bias over heads",
            masked(
                MaskShape::bias([1, 1, 1501, 1501]),
                attention(1, [16, 8], [1501, 1501], 128),
            ),
        ),
        ("bias of keys", masked(MaskShape::bias([1, 1, 1, 4608]), flux())),
        (
            "CLIP, causal",
            masked(MaskShape::Causal, attention(1, [12, 12], [77, 77], 64)),
        ),
        ("in e4m3", flux().in_fp8_if_possible()),
        (
            "in e4m3, in the joint buffers of a film",
            AttentionShape::of_rows(20_280, (24, 128), (9216, 15_360), DType::BF16, MaskShape::None)
                .in_fp8_if_possible(),
        ),
        ("lengths", masked(MaskShape::Lengths, flux())),
        (
            "lengths, batch of 2",
            masked(MaskShape::Lengths, attention(2, [24, 24], [1024, 333], 128)),
        ),
        ("window behind", window(128, 5000)),
        ("window ahead", window(5000, 128)),
        ("window of both", window(128, 128)),
        ("window, causal", window(128, 0)),
    ];
    for width in [32, 40, 64, 72, 80, 96, 160, 192, 256] {
        shapes.push(("width", attention(1, [16, 16], [4096, 4096], width)));
    }
    shapes
}

fn convolution(spatial: &[usize], channels: [usize; 2], side: usize) -> ConvolutionShape {
    let each = |value: usize| vec![value; spatial.len()];
    ConvolutionShape {
        batch: 1,
        spatial: spatial.to_vec(),
        channels_in: channels[0],
        channels_out: channels[1],
        filter: each(side),
        before: each(side / 2),
        after: each(side / 2),
        strides: each(1),
        dilations: each(1),
        dtype: DType::BF16,
        has_bias: true,
    }
}

fn convolutions() -> Vec<(&'static str, ConvolutionShape)> {
    let padded = |shape, before: &[usize], after: &[usize]| ConvolutionShape {
        before: before.to_vec(),
        after: after.to_vec(),
        ..shape
    };
    let strip = || convolution(&[66, 1024], [128, 128], 3);
    let film = || convolution(&[18, 256, 256], [128, 128], 3);
    let rows_first = |channels| convolution(&[33, 19, 834], channels, 3);
    vec![
        ("512 at 128", convolution(&[128, 128], [512, 512], 3)),
        ("512 at 512", convolution(&[512, 512], [512, 512], 3)),
        ("256 at 1024", convolution(&[1024, 1024], [256, 256], 3)),
        ("128 at 1024", convolution(&[1024, 1024], [128, 128], 3)),
        ("16 to 512", convolution(&[128, 128], [16, 512], 3)),
        ("128 to 3", convolution(&[1024, 1024], [128, 3], 3)),
        (
            "256 to 128, no neighbours",
            convolution(&[1024, 1024], [256, 128], 1),
        ),
        (
            "no bias",
            ConvolutionShape {
                has_bias: false,
                ..strip()
            },
        ),
        (
            "f16",
            ConvolutionShape {
                dtype: DType::F16,
                ..strip()
            },
        ),
        (
            "f32",
            ConvolutionShape {
                dtype: DType::F32,
                ..strip()
            },
        ),
        (
            "f32, no bias",
            ConvolutionShape {
                dtype: DType::F32,
                has_bias: false,
                ..strip()
            },
        ),
        ("inner strip", padded(strip(), &[0, 1], &[0, 1])),
        ("first strip", padded(strip(), &[1, 1], &[0, 1])),
        ("last strip", padded(strip(), &[0, 1], &[1, 1])),
        (
            "half the size",
            ConvolutionShape {
                strides: vec![2, 2],
                ..padded(convolution(&[1024, 1024], [128, 128], 3), &[0, 0], &[1, 1])
            },
        ),
        (
            "film, Wan 96",
            padded(convolution(&[6, 480, 832], [96, 96], 3), &[0, 1, 1], &[0, 1, 1]),
        ),
        (
            "film, Wan 384",
            padded(convolution(&[23, 60, 104], [384, 384], 3), &[0, 1, 1], &[0, 1, 1]),
        ),
        ("film, Hunyuan 128", padded(film(), &[0, 0, 0], &[0, 0, 0])),
        ("film, first frames", padded(film(), &[2, 1, 1], &[0, 1, 1])),
        (
            "film, Hunyuan's rows first",
            padded(rows_first([256, 256]), &[0; 3], &[0; 3]),
        ),
        (
            "film, Hunyuan 256 to 128",
            padded(rows_first([256, 128]), &[0; 3], &[0; 3]),
        ),
        (
            "film, Hunyuan 128 to 3",
            padded(rows_first([128, 3]), &[0; 3], &[0; 3]),
        ),
        (
            "film, Hunyuan 3 to 128",
            padded(rows_first([3, 128]), &[0; 3], &[0; 3]),
        ),
        (
            "film, Hunyuan's halved",
            ConvolutionShape {
                strides: vec![2, 2, 2],
                ..padded(rows_first([128, 128]), &[0; 3], &[0; 3])
            },
        ),
        ("sound, 7", convolution(&[4096], [512, 512], 7)),
        (
            "sound, 7, apart by 9",
            ConvolutionShape {
                dilations: vec![9],
                ..padded(convolution(&[4096], [512, 512], 7), &[27], &[27])
            },
        ),
    ]
}

/// Prints the outcome of each shape; returns those without a plan.
fn refused<S: PlanShape>(maker: &Maker, shapes: Vec<(&str, S)>) -> Vec<String> {
    let mut refused = Vec::new();
    for (name, shape) in shapes {
        let began = Instant::now();
        match maker.plan(&shape, MadeBy::Stage) {
            Ok((plan, _)) => eprintln!(
                "{} {}: {name}: {} ms, {} bytes of workspace",
                maker.card,
                S::NAME,
                began.elapsed().as_millis(),
                plan.workspace()
            ),
            Err(failure) => {
                eprintln!("{} {}: {name}: {failure}", maker.card, S::NAME);
                refused.push(format!("{name}: {failure}"));
            }
        }
    }
    refused
}

#[test]
#[ignore = "needs libcudnn"]
fn every_attention_shape_has_a_plan() {
    assert_eq!(refused(&H100.maker(None), attentions()), [""; 0]);
}

#[test]
#[ignore = "needs libcudnn"]
fn every_convolution_shape_has_a_plan() {
    assert_eq!(refused(&H100.maker(None), convolutions()), [""; 0]);
}

#[test]
#[ignore = "needs libcudnn"]
fn other_cards_have_plans_too() {
    for card in OTHERS {
        let some = |shapes: Vec<_>| shapes.into_iter().take(3).collect();
        assert_eq!(refused(&card.maker(None), some(attentions())), [""; 0]);
        assert_eq!(
            refused(&card.maker(None), convolutions().into_iter().take(3).collect()),
            [""; 0]
        );
    }
}

#[test]
#[ignore = "needs libcudnn"]
fn unsupported_shapes_are_refused() {
    let odd = attention(1, [2, 2], [64, 64], 60);
    for (maker, shape) in [(T4.maker(None), flux()), (H100.maker(None), odd)] {
        let failure = maker.plan(&shape, MadeBy::Stage).err().expect("no plan");
        eprintln!("{failure}");
        assert!(!failure.is_of_the_card(), "{failure}");
    }
    let f32 = AttentionShape {
        dtype: DType::F32,
        ..flux()
    };
    assert!(H100.maker(None).plan(&f32, MadeBy::Stage).is_err());
}

#[test]
#[ignore = "needs libcudnn"]
fn a_plan_is_loaded_from_its_folder() {
    let at = tempfile::tempdir().unwrap();
    let maker = |card: &Described| card.maker(Some(Folder::at(at.path(), 8)));
    let plan = |maker: &Maker| {
        let began = Instant::now();
        let (plan, _) = maker.plan(&flux(), MadeBy::Stage).unwrap();
        eprintln!("new {}: {} ms", plan.is_new(), began.elapsed().as_millis());
        plan
    };
    let first = plan(&maker(&H100));
    assert!(first.is_new());
    let again = plan(&maker(&H100));
    assert!(!again.is_new());
    assert_eq!(first.workspace(), again.workspace());
    assert!(
        plan(&maker(&OTHERS[0])).is_new(),
        "that of another card is none of its"
    );

    // An intact file with a text that cuDNN rejects is replaced.
    let made = maker(&H100);
    let key = made.key(&flux());
    let folder = Folder::at(at.path(), 8);
    assert!(folder.read(&key).is_some());
    folder.write(&key, b"{\"no\": \"plan\"}");
    assert!(plan(&made).is_new());
    assert!(!plan(&made).is_new());
}

/// Background compilation for a card.
fn ahead(card: &'static Described, folder: Option<Folder>) -> Ahead<Maker> {
    Ahead::of_threads(
        Box::new(move |idle| Ok(idle.unwrap_or_else(|| card.maker(folder.clone())))),
        4,
    )
}

/// Counts of plans compiled in the background, and in stages, by `work`.
fn made(work: impl FnOnce()) -> (u64, u64) {
    let before = PlansMade::now();
    work();
    let now = PlansMade::now();
    (now.ahead - before.ahead, now.in_stages - before.in_stages)
}

#[test]
#[ignore = "needs libcudnn"]
fn a_plan_compiled_ahead_is_not_compiled_again() {
    let maker = H100.maker(None);
    let ahead = ahead(&H100, None);
    let (picture, narrow) = (
        convolution(&[64, 64], [64, 64], 3),
        convolution(&[64, 64], [64, 3], 3),
    );
    let odd = attention(1, [2, 2], [64, 64], 60);
    let f32 = ConvolutionShape {
        dtype: DType::F32,
        ..picture.clone()
    };
    let planned = [
        Planned::Attention(flux()),
        Planned::Convolution(picture.clone()),
        Planned::Convolution(narrow.clone()),
        Planned::Attention(odd.clone()),
        Planned::Convolution(f32),
    ];
    let (mut attentions, mut convolutions) = (Made::new(), Made::new());
    let (before, in_stages) = made(|| {
        let began = Instant::now();
        // Two identical requests.
        for _ in 0..2 {
            ahead.ask(maker.all_ahead(&planned));
        }
        eprintln!("asked for in {:?}", began.elapsed());
        // A queued plan is not waited for; here each has a thread.
        while !ahead.is_idle() {
            std::thread::yield_now();
        }
        let began = Instant::now();
        assert!(attentions.plan(&maker, &ahead, &flux()).unwrap().is_some());
        assert!(
            attentions.plan(&maker, &ahead, &odd).unwrap().is_none(),
            "a refusal"
        );
        for shape in [&picture, &narrow] {
            let plan = convolutions.plan(&maker, &ahead, shape).unwrap().unwrap();
            assert!(!plan.is_new(), "it was loaded");
        }
        eprintln!("found in {:?}", began.elapsed());
        // It is cached.
        assert!(convolutions.plan(&maker, &ahead, &picture).unwrap().is_some());
    });
    assert_eq!((before, in_stages), (4, 0));
    // A shape that was not requested is compiled on demand.
    let other = attention(1, [4, 4], [256, 256], 64);
    let (before, in_stages) =
        made(|| assert!(attentions.plan(&maker, &ahead, &other).unwrap().unwrap().is_new()));
    assert_eq!((before, in_stages), (0, 1));
}

#[test]
#[ignore = "needs libcudnn"]
fn a_plan_on_disk_is_found_ahead() {
    let at = tempfile::tempdir().unwrap();
    let folder = || Some(Folder::at(at.path(), 8));
    let maker = H100.maker(folder());
    for expected in [(1, 0), (0, 0)] {
        let ahead = ahead(&H100, folder());
        let counted = made(|| {
            ahead.ask(maker.all_ahead(&[Planned::Attention(flux())]));
            while !ahead.is_idle() {
                std::thread::yield_now();
            }
            let mut attentions = Made::new();
            assert!(attentions.plan(&maker, &ahead, &flux()).unwrap().is_some());
        });
        assert_eq!(counted, expected);
    }
}

#[test]
#[ignore = "needs libcudnn"]
fn an_invalid_plan_text_is_replaced() {
    let maker = H100.maker(None);
    let ahead = ahead(&H100, None);
    let key = maker.key(&flux());
    ahead.ask([(
        key,
        Box::new(|_: &Maker| Ok(b"{\"no\": \"plan\"}".to_vec())) as Make<Maker>,
    )]);
    while !ahead.is_idle() {
        std::thread::yield_now();
    }
    let mut attentions = Made::new();
    let counted = made(|| {
        assert!(
            attentions
                .plan(&maker, &ahead, &flux())
                .unwrap()
                .unwrap()
                .is_new()
        )
    });
    assert_eq!(counted, (0, 1));
}

/// Duration of compiling the plans of a whole request, by number of threads. A measurement: asserts only that all
/// plans are compiled.
#[test]
#[ignore = "needs libcudnn"]
fn compile_time_of_many_threads_and_of_one() {
    for threads in [1, 2, 4, 8] {
        let maker = H100.maker(None);
        let open = |idle: Option<Maker>| Ok(idle.unwrap_or_else(|| H100.maker(None)));
        let ahead = Ahead::of_threads(Box::new(open), threads);
        let planned: Vec<Planned> = attentions()
            .into_iter()
            .take(6)
            .map(|(_, shape)| Planned::Attention(shape))
            .chain(
                convolutions()
                    .into_iter()
                    .take(8)
                    .map(|(_, shape)| Planned::Convolution(shape)),
            )
            .collect();
        let began = Instant::now();
        let counted = made(|| {
            ahead.ask(maker.all_ahead(&planned));
            while !ahead.is_idle() {
                std::thread::yield_now();
            }
        });
        eprintln!("{threads} threads: {:?}", began.elapsed());
        assert_eq!(counted, (planned.len() as u64, 0));
    }
}
