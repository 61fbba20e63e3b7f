use super::find::is_key;
use super::*;

/// A folder with these files, each an empty object of JSON.
pub(super) fn folder_with(files: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in files {
        let path = folder.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "{}").unwrap();
    }
    folder
}

fn models(folder: &Path) -> Models {
    let settings = ModelSettings {
        folders: vec![folder.to_owned()],
        ..ModelSettings::default()
    };
    Models::new(
        settings,
        folder.join("no-hub-cache"),
        Arc::new(pipelines::families()),
    )
}

fn reference(id: &str) -> ModelRef {
    ModelRef {
        id: id.to_owned(),
        ..Default::default()
    }
}

#[test]
fn a_revision_that_is_not_there_is_named() {
    let models = Models::new(
        ModelSettings::default(),
        PathBuf::from("/no/such/cache"),
        Arc::new(pipelines::families()),
    );
    let named = ModelRef {
        id: SHIPPED_ID.to_owned(),
        revision: "abc".to_owned(),
        ..Default::default()
    };
    let refused = models.resolve(&named).unwrap_err();
    assert_eq!(
        refused,
        Error::ModelNotFound {
            id: format!("{SHIPPED_ID}@abc")
        }
    );
}

#[test]
fn folders_files_and_hub_caches_are_found() {
    let folder = folder_with(&[
        "plain/model_index.json",
        "owner/name/model_index.json",
        "single.safetensors",
        "blocks.gguf",
        "pickled.pth",
        "owner/short.pt",
        "quick.instant.json",
        "models--me--mine/snapshots/abc/model_index.json",
        "models--me--mine/snapshots/def/model_index.json",
        "notes.txt",
    ]);
    std::fs::create_dir_all(folder.path().join("models--me--mine/refs")).unwrap();
    std::fs::write(folder.path().join("models--me--mine/refs/main"), "def\n").unwrap();
    let models = models(folder.path());
    let single = ["single", "blocks", "pickled", "owner/short"];
    for id in ["plain", "owner/name", "name", "quick", "me/mine"]
        .into_iter()
        .chain(single)
    {
        assert!(models.resolve(&reference(id)).is_ok(), "{id}");
    }
    assert!(matches!(
        models.resolve(&reference("other")),
        Err(Error::ModelNotFound { .. })
    ));
}

#[test]
fn a_model_is_there_by_every_name_that_requests_may_give_it() {
    let repository = "models--black-forest-labs--FLUX.1-dev";
    let folder = folder_with(&[
        &format!("{repository}/snapshots/abc/model_index.json"),
        &format!("{repository}/refs/main"),
        "one/twin.safetensors",
        "two/twin.gguf",
        "a+b&c.safetensors",
    ]);
    std::fs::write(folder.path().join(repository).join("refs/main"), "abc").unwrap();
    let models = models(folder.path());
    let ids: Vec<String> = models.list().iter().map(|found| found.id.clone()).collect();
    for name in [
        "flux-dev",
        "FLUX-dev+4-bit",
        "flux-dev@main",
        "flux-dev&ink",
        "FLUX.1-dev@abc+transformer=nf4&styles/ink",
        "black-forest-labs/FLUX.1-dev@main",
        "one\\twin.safetensors",
        "twin",
        "a+b&c",
        "a+b&c+8-bit&ink",
    ] {
        assert!(models.has(name), "{name}");
        assert!(is_among(&pipelines::families(), &ids, name), "{name}");
    }
    for name in [
        "flux-schnell",
        "dev",
        "black-forest-labs/FLUX.1-dev:a.gguf",
        "+4-bit",
        "",
    ] {
        assert!(!models.has(name), "{name}");
        assert!(!is_among(&pipelines::families(), &ids, name), "{name}");
    }
    assert!(!models.has("flux-dev@v2"));
    assert!(
        is_among(&pipelines::families(), &ids, "flux-dev@v2"),
        "a list of ids says no revision"
    );
}

/// FramePack's own repositories have a transformer alone, at their root.
#[test]
fn a_transformer_alone_is_found_when_it_is_whole() {
    let weights = "models--me--pack/snapshots/abc/diffusion_pytorch_model.safetensors";
    let folder = folder_with(&["pack/config.json", "other/config.json", weights]);
    let config = r#"{"_class_name": "HunyuanVideoTransformer3DModelPacked"}"#;
    for name in ["pack", "models--me--pack/snapshots/abc"] {
        std::fs::write(folder.path().join(name).join("config.json"), config).unwrap();
    }
    let found = |id: &str| models(folder.path()).resolve(&reference(id)).is_ok();
    assert!(found("pack") && found("me/pack") && !found("other"));
    std::fs::remove_file(folder.path().join(weights)).unwrap();
    assert!(!found("me/pack"));
}

#[test]
fn a_revision_is_part_of_the_key() {
    let folder = folder_with(&["models--me--mine/snapshots/abc/model_index.json"]);
    let resolved = models(folder.path()).resolve(&reference("me/mine")).unwrap();
    assert_eq!(resolved.entry.key, "me/mine@abc+full");
}

#[test]
fn the_hub_cache_is_scanned_and_branches_name_revisions() {
    let folder = folder_with(&["mine/model_index.json"]);
    let cache = folder_with(&[
        "models--me--mine/snapshots/abc/model_index.json",
        "models--me--mine/snapshots/def/model_index.json",
        "models--me--half/snapshots/abc/vae/config.json",
    ]);
    let refs = cache.path().join("models--me--mine/refs");
    std::fs::create_dir_all(refs.join("pr")).unwrap();
    for (name, commit) in [("main", "def"), ("pr/1", "abc")] {
        std::fs::write(refs.join(name), commit).unwrap();
    }
    let models = Models::new(
        models(folder.path()).settings,
        cache.path().to_owned(),
        Arc::new(pipelines::families()),
    );
    let key = |id: &str, revision: &str| {
        let mut model = reference(id);
        model.revision = revision.to_owned();
        models.resolve(&model).map(|resolved| resolved.entry.key.clone())
    };
    assert_eq!(key("me/mine", "").unwrap(), "me/mine@def+full");
    assert_eq!(key("me/mine", "pr/1").unwrap(), "me/mine@abc+full");
    assert_eq!(key("me/mine", "main").unwrap(), "me/mine@def+full");
    assert_eq!(key("me/mine", "ab").unwrap(), "me/mine@abc+full");
    assert_eq!(key("me/mine@pr/1", "").unwrap(), "me/mine@abc+full");
    assert_eq!(key("me/mine@pr/1+vae=nf4", "").unwrap(), "me/mine@abc+vae=nf4");
    assert!(key("me/mine@pr/1", "def").is_err(), "two revisions");
    assert!(key("me/mine", "other").is_err());
    assert!(key("me/half", "").is_err(), "no pipeline yet");
}

#[test]
fn formats_are_part_of_the_key_and_unknown_ones_are_refused() {
    let folder = folder_with(&["plain/model_index.json"]);
    let models = models(folder.path());
    let mut asked = reference("plain");
    asked.formats = AskedFormats {
        preset: "4-bit".to_owned(),
        ..Default::default()
    };
    let entry = models.resolve(&asked).unwrap().entry;
    assert_eq!(entry.key, "plain+4-bit");
    asked.formats = AskedFormats {
        preset: "5-bit".to_owned(),
        ..Default::default()
    };
    assert!(matches!(models.resolve(&asked), Err(Error::Invalid(_))));
}

#[test]
fn an_entry_is_resolved_by_its_key() {
    let folder = folder_with(&[
        "plain/model_index.json",
        "a+b/model_index.json",
        "at@home/model_index.json",
        "models--me--mine/snapshots/abc/model_index.json",
    ]);
    let models = models(folder.path());
    let key = |id: &str| {
        models
            .resolve(&reference(id))
            .map(|resolved| resolved.entry.key.clone())
    };
    for (id, means) in [
        ("plain+full", "plain+full"),
        ("plain+4-bit", "plain+4-bit"),
        ("plain+8-bit,vae=nf4", "plain+8-bit,vae=nf4"),
        ("plain+transformer=fp8", "plain+transformer=fp8"),
        ("a+b", "a+b+full"),
        ("a+b+vae=nf4", "a+b+vae=nf4"),
        ("at@home+vae=nf4", "at@home+vae=nf4"),
        ("me/mine@abc+vae=nf4", "me/mine@abc+vae=nf4"),
        ("mine+full", "me/mine@abc+full"),
    ] {
        assert_eq!(key(id).unwrap(), means, "{id}");
    }
    for wrong in [
        "plain+",
        "plain+5-bit",
        "plain+4-bit,8-bit",
        "plain+vae=int7",
        "plain+vae",
    ] {
        assert!(matches!(key(wrong), Err(Error::Invalid(_))), "{wrong}");
    }
    for missing in ["other+full", "me/mine@abd+full", "a+c"] {
        assert!(
            matches!(key(missing), Err(Error::ModelNotFound { .. })),
            "{missing}"
        );
    }
    let mut twice = reference("plain+4-bit");
    twice.formats = AskedFormats {
        preset: "8-bit".to_owned(),
        ..Default::default()
    };
    assert!(matches!(models.resolve(&twice), Err(Error::Invalid(_))));
}

#[test]
fn an_ambiguous_name_is_refused() {
    let folder = folder_with(&["a/x/model_index.json", "b/x/model_index.json"]);
    let models = models(folder.path());
    assert!(models.resolve(&reference("x")).is_err());
    assert!(models.resolve(&reference("a/x")).is_ok());
}

#[test]
fn a_component_that_is_named_twice_is_refused() {
    let folder = folder_with(&["plain/model_index.json"]);
    let models = models(folder.path());
    let twice = models.resolve(&reference("plain+transformer=nf4,transformer=int8"));
    let Err(Error::Invalid(problems)) = twice else {
        panic!("{twice:?}")
    };
    assert!(
        problems[0].to_string().contains("transformer twice"),
        "{problems:?}"
    );
}

#[test]
fn a_scan_during_a_blocked_scan_returns_the_last_listing() {
    let folder = folder_with(&["plain/model_index.json"]);
    let models = models(folder.path());
    let lists = |listing: &[Found], id: &str| listing.iter().any(|found| found.id == id);
    assert!(lists(&models.list(), "plain"));
    let turn = models.listing.block().unwrap(); // a scan that is blocked
    std::fs::create_dir(folder.path().join("more")).unwrap();
    std::fs::write(folder.path().join("more/model_index.json"), "{}").unwrap();
    assert!(!lists(&models.rescan(), "more"));
    assert!(models.resolve(&reference("plain")).is_ok());
    drop(turn);
    assert!(lists(&models.rescan(), "more"));
}

#[test]
fn a_key_matches_by_the_first_digits_of_its_revision() {
    let key = "me/mine@b28b7af69320201d1cf206ebf28373980add1451+full";
    for asked in [key, "me/mine@b28b7af6+full"] {
        assert!(is_key(key, asked), "{asked}");
    }
    for asked in [
        "me/mine+full",
        "me/mine@b28b7af7+full",
        "me/mine@b28b7af6+4-bit",
        "me/mine@+full",
        "you/mine@b28b7af6+full",
    ] {
        assert!(!is_key(key, asked), "{asked}");
    }
}

#[test]
fn listed_models_can_be_named() {
    let folder = folder_with(&[
        "a,b.safetensors",
        "v1:2.gguf",
        "a&b.safetensors",
        "a.safetensors",
        "100%.safetensors",
        "with space.sft",
        "at@home.safetensors",
        "plus+4-bit.safetensors",
        "plus.safetensors",
        "back\\slash.safetensors",
        "flux/deep.safetensors",
        "LOUD.SAFETENSORS",
        "twin.gguf",
        "twin.safetensors",
        "beside/model_index.json",
        "beside.gguf",
    ]);
    let models = models(folder.path());
    let means = |id: &str| {
        models
            .resolve(&reference(id))
            .map(|resolved| resolved.entry.key.clone())
    };
    let listed = models.list();
    let own: Vec<&Found> = listed
        .iter()
        .filter(|found| found.path.starts_with(folder.path()))
        .collect();
    assert_eq!(own.len(), 16);
    for found in own {
        let id = &found.id;
        assert_eq!(means(id), Ok(format!("{id}+full")));
        assert_eq!(means(&format!("{id}+8-bit")), Ok(format!("{id}+8-bit")));
        if let Some(whole) = found.id_with_ending() {
            assert_eq!(means(&whole), Ok(format!("{id}+full")), "{whole}");
        }
    }
    for (asked, id) in [
        ("flux\\deep.safetensors", "flux/deep"),
        ("flux\\deep", "flux/deep"),
        ("deep.safetensors", "flux/deep"),
        ("back\\slash", "back\\slash"),
        ("LOUD.SAFETENSORS", "LOUD"),
        ("twin.gguf", "twin.gguf"),
        ("beside", "beside"),
        ("beside.gguf", "beside.gguf"),
    ] {
        assert_eq!(means(asked), Ok(format!("{id}+full")), "{asked}");
    }
    let refused = means("twin").unwrap_err().to_string();
    assert!(refused.contains("twin.gguf or twin.safetensors"), "{refused}");
    assert!(matches!(means("twin.pt"), Err(Error::ModelNotFound { .. })));
}

#[test]
fn the_folders_of_comfyui_are_read_by_their_meaning() {
    let folder = folder_with(&[
        "models/diffusers/base/model_index.json",
        "models/vae/ae.safetensors",
        "models/text_encoders/t5xxl.safetensors",
        "models/clip/clip_l.safetensors",
        "models/loras/styles/ink.safetensors",
        "models/controlnet/canny.safetensors",
        "models/checkpoints/damaged.safetensors",
    ]);
    let write = |path: &str, tensors: &[&str]| {
        let entry = |name: &&str| {
            format!("{name:?}: {{\"dtype\": \"F32\", \"shape\": [1], \"data_offsets\": [0, 4]}}")
        };
        let header = tensors.iter().take(1).map(entry).collect::<String>();
        let header = format!("{{{header}}}");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 4]);
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    write(
        "models/diffusion_models/flux/chroma.safetensors",
        &["distilled_guidance_layer.in_proj.weight"],
    );
    write("models/checkpoints/strange.safetensors", &["anything.weight"]);
    let settings = ModelSettings {
        comfyui: vec![folder.path().to_owned()],
        ..ModelSettings::default()
    };
    let models = Models::new(
        settings,
        folder.path().join("no-hub-cache"),
        Arc::new(pipelines::families()),
    );
    let listed = models.list();
    let own = listed
        .iter()
        .filter(|found| found.path.starts_with(folder.path()));
    let own: Vec<&str> = own.map(|found| found.id.as_str()).collect();
    assert_eq!(
        own,
        ["base", "damaged"],
        "what is damaged says so when it is opened"
    );
    let others: Vec<(String, String)> = models
        .others()
        .into_iter()
        .map(|other| (other.name, other.what))
        .collect();
    let other = |name: &str, what: &str| (name.to_owned(), what.to_owned());
    assert_eq!(
        others,
        [
            other("strange.safetensors", "not known here"),
            other("flux/chroma.safetensors", "Chroma"),
        ]
    );
    let adapters = models.adapters();
    let own = adapters
        .iter()
        .filter(|adapter| adapter.path.starts_with(folder.path()));
    let own: Vec<&str> = own.map(|adapter| adapter.id.as_str()).collect();
    assert_eq!(own, ["styles/ink"]);
    // A file of the same length and time of writing is another one.
    let chroma = "models/diffusion_models/flux/chroma.safetensors";
    let written = folder.path().join(chroma).metadata().unwrap().modified().unwrap();
    write(chroma, &["distilled-guidance-layer.in-proj.weight"]);
    let file = std::fs::File::options()
        .write(true)
        .open(folder.path().join(chroma));
    file.unwrap().set_modified(written).unwrap();
    models.rescan();
    let others = models.others();
    assert!(
        others.iter().all(|other| other.what == "not known here"),
        "{others:?}"
    );
}
