//! Names of cards, and the profiles that their memory is managed by.

use candle_core::DType;
use gpu::{
    CardKind, CudaDtype, CudaSettings, CudaWhich, DeviceChoice, DeviceSpec, FaultAction, MemoryProfile,
    ProfileName,
};
use proptest::prelude::*;
use residency::{Bytes, Policy};

fn cuda(text: &str) -> CudaSettings {
    match text.parse() {
        Ok(DeviceSpec::Cuda(settings)) => settings,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn an_nvidia_card_is_named_by_number_or_uuid() {
    assert_eq!(cuda("cuda").which, CudaWhich::Ordinal(0));
    assert_eq!(cuda("cuda:1").which, CudaWhich::Ordinal(1));
    assert_eq!(
        cuda("cuda:gpu-8F2c").which,
        CudaWhich::Uuid("GPU-8f2c".to_owned())
    );
    assert_eq!(
        cuda("cuda:MIG-8f2c").which,
        CudaWhich::Uuid("MIG-8f2c".to_owned())
    );
    assert_eq!(cuda("cuda,dtype=f16").dtype, Some(CudaDtype::F16));
    for wrong in [
        "cuda:",
        "cuda:GPU-",
        "cuda:GPU-xyz",
        "cuda:first",
        "cuda:-1",
        "cuda0",
        "cuda:é2345",
    ] {
        let reported = wrong.parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(reported.contains("cuda:"), "{wrong}: {reported}");
    }
}

#[test]
fn faults_are_parsed_like_those_of_a_simulated_card() {
    let settings = cuda("cuda:1,poison-at=denoise:2,hang-at=load,die-at=decode:1,die-generations=3");
    let faults: Vec<_> = settings
        .faults
        .iter()
        .map(|f| (f.action, f.place.as_str(), f.nth))
        .collect();
    let expected = [
        (FaultAction::Poison, "denoise", 2),
        (FaultAction::Hang, "load", 1),
        (FaultAction::Die, "decode", 1),
    ];
    assert_eq!(faults, expected);
    assert_eq!(settings.die_generations, 3);
    for (wrong, words) in [
        ("cuda:0,poison-at=", "denoise:2"),
        ("cuda:0,die-at=x:0", "denoise:2"),
        ("cuda:0,dtype=f64", "bf16, f16 or f32"),
        ("cuda:0,lose-at=load", "no option"),
        ("cuda:0,speed=1GiB", "no option"),
        ("cuda:0,die-generations=few", "number of processes"),
    ] {
        let reported = wrong.parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(reported.contains(words), "{wrong}: {reported}");
    }
}

#[test]
fn a_poisoned_simulated_card_is_lost() {
    let device: DeviceSpec = "sim:1GiB,poison-at=denoise:2".parse().unwrap();
    let profile = MemoryProfile::of(ProfileName::Balanced, Bytes::gib(1));
    let mut card = gpu::open(&device, 1, &profile).unwrap();
    assert_eq!(card.fault_at("denoise"), None);
    card.memory().unwrap();
    assert_eq!(card.fault_at("denoise"), Some(FaultAction::Poison));
    assert!(card.memory().unwrap_err().to_string().contains("lost"));
}

#[test]
fn cards_without_bf16_arithmetic_default_to_f16() {
    let automatic = cuda("cuda");
    assert_eq!(automatic.compute_dtype((9, 0)), DType::BF16);
    assert_eq!(automatic.compute_dtype((8, 0)), DType::BF16);
    assert_eq!(automatic.compute_dtype((7, 5)), DType::F16);
    assert_eq!(cuda("cuda:0,dtype=f32").compute_dtype((7, 5)), DType::F32);
    assert_eq!(cuda("cuda:0,dtype=bf16").compute_dtype((7, 5)), DType::BF16);
}

#[test]
fn a_uuid_is_matched_by_its_prefix() {
    let meant = |text: &str, uuid| cuda(text).which.matches(3, uuid);
    assert!(meant("cuda:GPU-8f2c", "GPU-8f2c1111-22"));
    assert!(meant("cuda:GPU-8F2C1111-22", "GPU-8f2c1111-22"));
    assert!(!meant("cuda:GPU-8f2c1111-223", "GPU-8f2c1111-22"));
    assert!(!meant("cuda:GPU-9", "GPU-8f2c1111-22"));
    assert!(meant("cuda:3", "GPU-8f2c1111-22"));
    assert!(!meant("cuda:2", "GPU-8f2c1111-22"));
}

#[test]
fn named_cards_are_resolved_in_order() {
    let choices: Vec<DeviceChoice> = ["sim:2GiB", "cpu:1GiB"].map(|text| text.parse().unwrap()).into();
    let found = DeviceChoice::resolve(&choices).unwrap();
    let names: Vec<String> = found.devices.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["sim:2GiB", "cpu:1GiB"]);
    assert_eq!(found.fallback, None);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn without_cuda_auto_is_system_memory_and_a_named_card_is_refused_with_a_remedy() {
    let found = DeviceChoice::resolve(&[DeviceChoice::Auto]).unwrap();
    assert_eq!(found.devices, [DeviceSpec::Cpu { capacity: None }]);
    assert!(found.fallback.is_some());
    let named: DeviceChoice = "cuda:0".parse().unwrap();
    let refused = DeviceChoice::resolve(&[named]).unwrap_err();
    assert!(matches!(refused, gpu::OpenError::NoCuda { .. }));
    assert!(refused.to_string().contains("--features cuda"), "{refused}");
}

#[test]
fn the_default_profile_depends_on_the_capacity() {
    let suits = |kind, gib| ProfileName::suggested(kind, Bytes::gib(gib));
    assert_eq!(suits(CardKind::Cuda, 11), ProfileName::Constrained);
    assert_eq!(suits(CardKind::Cuda, 12), ProfileName::Balanced);
    assert_eq!(suits(CardKind::Cuda, 39), ProfileName::Balanced);
    assert_eq!(suits(CardKind::Cuda, 40), ProfileName::Inference);
    assert_eq!(suits(CardKind::Simulated, 80), ProfileName::Inference);
    assert_eq!(suits(CardKind::Cpu, 4), ProfileName::Balanced);
}

#[test]
fn profiles_are_parsed_by_name_and_match_the_documentation() {
    for name in ProfileName::ALL {
        assert_eq!(name.to_string().parse(), Ok(name));
        assert_eq!(serde_json::to_string(&name).unwrap(), format!("\"{name}\""));
        let profile = MemoryProfile::of(name, Bytes::gib(80));
        assert_eq!(profile.staging_bytes.0 % profile.staging_chunk.0, 0, "{name}");
        assert!(profile.staging_bytes.0 / profile.staging_chunk.0 >= 8, "{name}");
        // The table in docs/OPERATING.md is this.
        let documented = include_str!("../../../../docs/OPERATING.md");
        let percent = profile
            .release_threshold
            .map(|bytes| bytes.0.div_ceil(Bytes::gib(80).0 / 100))
            .unwrap();
        let mib = |bytes: Bytes| bytes.0 >> 20;
        let policy = if name.policy() == Policy::Exclusive {
            "exclusive"
        } else {
            "shared"
        };
        let row = format!(
            "| `{name}` | {percent}% of the card | {} MiB | {} MiB | {} MiB | {policy} |",
            mib(profile.slack_limit),
            mib(profile.staging_bytes),
            mib(profile.staging_chunk)
        );
        assert!(documented.contains(&row), "{row}");
    }
    let reported = "turbo".parse::<ProfileName>().unwrap_err().to_string();
    assert!(reported.contains("quantization-heavy"), "{reported}");
}

proptest! {
    #[test]
    fn nvidia_settings_round_trip(
        which in prop_oneof![
            any::<u32>().prop_map(CudaWhich::Ordinal),
            "(GPU|MIG)-[0-9a-f-]{1,36}".prop_map(CudaWhich::Uuid),
        ],
        dtype in prop::option::of(prop_oneof![
            Just(CudaDtype::Bf16), Just(CudaDtype::F16), Just(CudaDtype::F32)
        ]),
        places in prop::collection::vec(("[a-z_]{1,9}", 1_u64..9), 0..4),
        die_generations in 0_u64..4,
    ) {
        let mut settings = CudaSettings::new(which);
        settings.dtype = dtype;
        settings.die_generations = die_generations;
        for (index, (place, nth)) in places.into_iter().enumerate() {
            let action = [FaultAction::Poison, FaultAction::Die, FaultAction::Hang][index % 3];
            settings.faults.push(gpu::Fault { action, place, nth });
        }
        let device = DeviceSpec::Cuda(settings);
        prop_assert_eq!(device.to_string().parse::<DeviceSpec>(), Ok(device));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "cuda[:,](GPU-|MIG-)?[0-9a-zA-Zé.,=:-]{0,40}") {
        let _ = text.parse::<DeviceSpec>();
    }
}
