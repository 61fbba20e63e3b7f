//! The adapters that requests can name: files and folders of peft in the configured folders, repositories of the hub cache,
//! and adapters that ship with the project.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::Error;
use engine::library::Entry;
use model::{AdapterFile, AdapterKind, AdapterUse, Families, StrengthCurve, adapter_stem};

use super::Models;
use super::comfyui::Meaning;
use super::names::{self, Named};
use super::scan::{SHIPPED_ADAPTERS, children, hub_model, is_pipeline, shipped_folder};
use crate::errors::{invalid, too_many};
use crate::references::AskedAdapter;

/// Most adapters of one request.
const MOST_ADAPTERS: usize = 16;

/// Prefix of the ids of adapters that ship with the project.
const SHIPPED: &str = "moored/";

/// Depth to which folders are scanned.
const DEPTH: usize = 3;

/// An adapter that can be named, as a scan found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundAdapter {
    pub id: String,
    /// A file, a folder of peft, or a ControlNet's.
    pub path: PathBuf,
    kind: AdapterKind,
    /// Size of its file, or of the files in its folder.
    pub bytes: u64,
}

impl Named for FoundAdapter {
    fn id(&self) -> &str {
        &self.id
    }

    fn set_id(&mut self, id: String) {
        self.id = id;
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn stem<'a>(&self, name: &'a str) -> Option<&'a str> {
        adapter_stem(name)
    }
}

/// An adapter of an entry.
impl Named for AdapterFile {
    fn id(&self) -> &str {
        &self.name
    }

    fn set_id(&mut self, id: String) {
        self.name = id;
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn stem<'a>(&self, name: &'a str) -> Option<&'a str> {
        adapter_stem(name)
    }
}

impl FoundAdapter {
    /// A folder that is an adapter; `None` for another.
    fn folder(families: &dyn Families, id: String, path: PathBuf) -> Option<FoundAdapter> {
        let kind = families.kind_of_folder(&path)?;
        let bytes = children(&path).iter().map(|path| length(path)).sum();
        Some(FoundAdapter {
            id,
            path,
            kind,
            bytes,
        })
    }

    /// A LoRA in one file.
    fn file(id: String, path: PathBuf) -> FoundAdapter {
        FoundAdapter {
            id,
            kind: AdapterKind::Lora,
            bytes: length(&path),
            path,
        }
    }

    /// Public name of its kind.
    pub fn kind_name(&self) -> &'static str {
        match self.kind {
            AdapterKind::ControlNet => "controlnet",
            AdapterKind::Lora => "lora",
        }
    }

    /// The adapter in the form in which it is attached to a model.
    fn to_attach(&self, ignores_unknown: bool) -> AdapterFile {
        AdapterFile {
            name: self.id.clone(),
            path: self.path.clone(),
            kind: self.kind,
            ignores_unknown,
        }
    }
}

fn length(path: &Path) -> u64 {
    path.metadata().map_or(0, |metadata| metadata.len())
}

impl Models {
    /// Every adapter, by id; of several with one id, the first that was found. Scans folders when the listing is too old.
    pub fn adapters(&self) -> Arc<Vec<FoundAdapter>> {
        self.adapter_listing.current(|| self.scan_adapters())
    }

    /// Scans the folders for adapters, however recent the listing.
    pub fn rescan_adapters(&self) -> Arc<Vec<FoundAdapter>> {
        self.adapter_listing.rescan(|| self.scan_adapters())
    }

    /// A listing that is current for these adapters: the folders are scanned again if it lacks one of them, or if a file is gone.
    fn adapters_with<'a>(&self, asked: impl Iterator<Item = &'a str>) -> Arc<Vec<FoundAdapter>> {
        let there = self.adapters();
        let mut found = asked.map(|asked| find(&there, asked));
        match found.all(|found| found.is_some_and(|found| found.path.exists())) {
            true => there,
            false => self.rescan_adapters(),
        }
    }

    /// The id of the adapter that a request names; `None` if no listed adapter has that name.
    pub fn adapter_name(&self, asked: &str) -> Option<String> {
        let known = self.adapter_listing.known(|| self.scan_adapters());
        find(&known, asked).map(|found| found.id.clone())
    }

    fn scan_adapters(&self) -> Vec<FoundAdapter> {
        let (families, mut found) = (&*self.families, Vec::new());
        for folder in &self.settings.adapters {
            scan(families, folder, "", DEPTH, &mut found);
        }
        let places = self.places_of_comfyui();
        let with = |wanted: Meaning| {
            let wanted = places.iter().filter(move |(meaning, _)| *meaning == wanted);
            wanted.map(|(_, folder)| folder)
        };
        for folder in with(Meaning::Loras) {
            scan(families, folder, "", DEPTH, &mut found);
        }
        for folder in with(Meaning::ControlNets) {
            let mut nets = Vec::new();
            scan(families, folder, "", DEPTH, &mut nets);
            // A ControlNet in a single file has a layout that is not read here.
            found.extend(nets.into_iter().filter(|net| net.kind == AdapterKind::ControlNet));
        }
        for repository in children(&self.hub_cache) {
            let name = repository.file_name().and_then(|name| name.to_str());
            if let Some(id) = name.and_then(hub::id_of_folder) {
                let holds_transformer = |file: &Path| self.holds_transformer(file);
                found.extend(of_hub(families, &repository, &id, &holds_transformer));
            }
        }
        if let Some(folder) = shipped_folder(SHIPPED_ADAPTERS) {
            scan(families, &folder, SHIPPED, 1, &mut found);
        }
        let mut listed = names::distinct(found.into_iter());
        listed.sort_by(|a, b| a.id.cmp(&b.id));
        listed
    }

    /// The entry with the adapters that a reference names, without those of strength 0. ControlNets are taken from a key
    /// (`from_key`), where reports name them, and refused elsewhere.
    pub(super) fn with_adapters(
        &self,
        entry: Entry,
        asked: &[AskedAdapter],
        from_key: bool,
    ) -> Result<Entry, Error> {
        if asked.is_empty() {
            return Ok(entry);
        }
        if asked.len() > MOST_ADAPTERS {
            return Err(invalid(
                "model.adapters",
                too_many(asked.len(), "adapters", MOST_ADAPTERS),
            ));
        }
        let there = self.adapters_with(asked.iter().map(|asked| asked.id.as_str()));
        let mut named: Vec<(AdapterFile, AdapterUse)> = Vec::new();
        for (index, asked) in asked.iter().enumerate() {
            let field = |name: &str| format!("model.adapters[{index}].{name}");
            let found = find(&there, &asked.id);
            let found = found.ok_or_else(|| invalid(&field("id"), not_found(&asked.id, &there)))?;
            if found.kind == AdapterKind::ControlNet && !from_key {
                let problem = format!(
                    "{:?} is a ControlNet: name it in controls, with its picture",
                    found.id
                );
                return Err(invalid(&field("id"), problem));
            }
            let file = found.to_attach(asked.ignore_unknown);
            let each = use_of(asked, index)?;
            match named.iter_mut().find(|(before, _)| before.name == file.name) {
                Some((before, uses)) => {
                    before.ignores_unknown |= file.ignores_unknown;
                    *uses = sum_of(uses, &each, index)?;
                }
                None => named.push((file, each)),
            }
        }
        let active = named.into_iter().filter(|(_, each)| is_active(each));
        let files: Vec<AdapterFile> = active.map(|(file, _)| file).collect();
        Ok(match files.is_empty() {
            true => entry,
            false => entry.with_adapters(files),
        })
    }

    /// The entry with these ControlNets after its adapters, each once.
    pub fn with_control_nets(&self, entry: &Entry, ids: &[String]) -> Result<Entry, Error> {
        let there = self.adapters_with(ids.iter().map(String::as_str));
        let mut files = entry.adapters.clone();
        for (index, id) in ids.iter().enumerate() {
            let found = find(&there, id);
            let field = format!("controls[{index}].id");
            let found = found.ok_or_else(|| invalid(&field, not_found(id, &there)))?;
            if found.kind != AdapterKind::ControlNet {
                let problem = format!(
                    "{:?} is no ControlNet; a LoRA is named in model.adapters",
                    found.id
                );
                return Err(invalid(&field, problem));
            }
            if !files.iter().any(|file| file.name == found.id) {
                files.push(found.to_attach(false));
            }
        }
        Ok(entry.with_adapters(files))
    }

    /// The name of an adapter of an entry, which a request may call by its file.
    pub fn name_in(entry: &Entry, id: &str) -> String {
        find(&entry.adapters, id).map_or_else(|| id.to_owned(), |file| file.name.clone())
    }

    /// How a request uses the adapters that its reference names and its entry has. The strengths of one that is named several
    /// times add up.
    pub fn uses_of(entry: &Entry, asked: &[AskedAdapter]) -> Result<Vec<AdapterUse>, Error> {
        let mut uses: Vec<AdapterUse> = Vec::new();
        for (index, asked) in asked.iter().enumerate() {
            let each = AdapterUse {
                name: Models::name_in(entry, &asked.id),
                ..use_of(asked, index)?
            };
            match uses.iter_mut().find(|before| before.name == each.name) {
                Some(before) => *before = sum_of(before, &each, index)?,
                None => uses.push(each),
            }
        }
        // Adapters of strength 0 are not in the entry.
        let loras = entry
            .adapters
            .iter()
            .filter(|file| file.kind == AdapterKind::Lora);
        let used = loras.filter_map(|file| uses.iter().find(|each| each.name == file.name));
        Ok(used.cloned().collect())
    }
}

/// An adapter by its id, with or without its ending, or by the path of its file.
fn find<'a, T: Named>(there: &'a [T], asked: &str) -> Option<&'a T> {
    let by_name = names::spellings(asked).find_map(|name| {
        let by_id = there.iter().find(|adapter| adapter.id() == name);
        by_id.or_else(|| there.iter().find(|adapter| names::is_called(*adapter, &name)))
    });
    let path = Path::new(asked);
    let is_at = |adapter: &&T| {
        path.is_absolute() && std::fs::canonicalize(adapter.path()).is_ok_and(|own| own == path)
    };
    by_name.or_else(|| there.iter().find(is_at))
}

/// Whether these adapters are exactly those of a reference, in order.
pub(super) fn are_named(adapters: &[AdapterFile], asked: &[AskedAdapter]) -> bool {
    let is_named =
        |(file, asked): (&AdapterFile, &AskedAdapter)| find(std::slice::from_ref(file), &asked.id).is_some();
    adapters.len() == asked.len() && adapters.iter().zip(asked).all(is_named)
}

/// Whether an adapter changes anything.
fn is_active(each: &AdapterUse) -> bool {
    !each.strength.is_zero() || each.text_strength != 0.0
}

/// Combines two uses of one adapter; `index` is that of the second.
fn sum_of(one: &AdapterUse, other: &AdapterUse, index: usize) -> Result<AdapterUse, Error> {
    let refused = |name: &str, problem: String| {
        let field = format!("model.adapters[{index}].{name}");
        invalid(&field, format!("with the others of {:?} {problem}", other.name))
    };
    let strength = one.strength.plus(&other.strength);
    let text_strength = one.text_strength + other.text_strength;
    StrengthCurve::constant(text_strength).map_err(|error| refused("text_strength", error.to_string()))?;
    Ok(AdapterUse {
        name: one.name.clone(),
        strength: strength.map_err(|error| refused("strength", error.to_string()))?,
        text_strength,
    })
}

fn use_of(asked: &AskedAdapter, index: usize) -> Result<AdapterUse, Error> {
    let field = |name: &str| format!("model.adapters[{index}].{name}");
    let strength = match (asked.curve.as_slice(), asked.strength) {
        ([], strength) => StrengthCurve::constant(strength.unwrap_or(1.0))
            .map_err(|error| invalid(&field("strength"), error.to_string()))?,
        (_, Some(_)) => {
            let problem = "excludes a strength for all steps: leave one out".to_owned();
            return Err(invalid(&field("curve"), problem));
        }
        (points, None) => {
            StrengthCurve::of(points.to_vec()).map_err(|error| invalid(&field("curve"), error.to_string()))?
        }
    };
    let text_strength = asked.text_strength.unwrap_or_else(|| strength.first());
    StrengthCurve::constant(text_strength)
        .map_err(|error| invalid(&field("text_strength"), error.to_string()))?;
    Ok(AdapterUse {
        name: asked.id.clone(),
        strength,
        text_strength,
    })
}

fn not_found(id: &str, there: &[FoundAdapter]) -> String {
    if let Some(ambiguous) = names::ambiguous(there, id) {
        return ambiguous;
    }
    match there {
        [] => format!(
            "{id:?} is not there, and no other adapter: set models.adapters to the folders that they are in"
        ),
        _ => format!("{id:?} is not there; `moored models --adapters` lists them"),
    }
}

/// Adapters in a folder and the folders in it: files, and folders of peft. Ids are paths without the ending.
fn scan(families: &dyn Families, folder: &Path, prefix: &str, depth: usize, found: &mut Vec<FoundAdapter>) {
    for child in children(folder) {
        let Some(name) = child.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if name.starts_with('.') {
            continue;
        }
        if let Some(folder) = FoundAdapter::folder(families, format!("{prefix}{name}"), child.clone()) {
            found.push(folder);
        } else if child.is_dir() {
            if depth > 1 {
                scan(families, &child, &format!("{prefix}{name}/"), depth - 1, found);
            }
        } else if let Some(stem) = adapter_stem(name) {
            found.push(FoundAdapter::file(format!("{prefix}{stem}"), child));
        }
    }
}

/// The adapters of a repository in a hub cache: of the revision of `main`, or the newest. A repository with a pipeline, or a
/// model of another kind, has none; nor are transformers and shards adapters. A single file has the repository's
/// name; of several files each has the repository's name and its own.
fn of_hub(
    families: &dyn Families,
    repository: &Path,
    id: &str,
    holds_transformer: &dyn Fn(&Path) -> bool,
) -> Vec<FoundAdapter> {
    let Some(snapshot) = hub_model(families, repository, id).into_iter().next() else {
        return Vec::new();
    };
    if is_pipeline(families, &snapshot.path) {
        return Vec::new();
    }
    if let Some(folder) = FoundAdapter::folder(families, id.to_owned(), snapshot.path.clone()) {
        return vec![folder];
    }
    if snapshot.path.join("config.json").is_file() {
        return Vec::new();
    }
    let mut files = Vec::new();
    scan(families, &snapshot.path, "", DEPTH, &mut files);
    files.retain(|adapter| {
        let is_file = !adapter.path.is_dir();
        !(is_file && (hub::is_shard(&adapter.path) || holds_transformer(&adapter.path)))
    });
    match &mut files[..] {
        [only] => only.id = id.to_owned(),
        several => several
            .iter_mut()
            .for_each(|adapter| adapter.id = format!("{id}/{}", adapter.id)),
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::tests::folder_with;
    use config::ModelSettings;

    fn models(folder: &Path) -> Models {
        let settings = ModelSettings {
            adapters: vec![folder.to_owned()],
            ..ModelSettings::default()
        };
        Models::new(
            settings,
            folder.join("no-hub-cache"),
            Arc::new(pipelines::families()),
        )
    }

    fn adapter(id: &str, strength: Option<f32>) -> AskedAdapter {
        AskedAdapter {
            id: id.to_owned(),
            strength,
            ..Default::default()
        }
    }

    fn base() -> Entry {
        let quantization = model::Quantization::NONE;
        Entry::new("base".to_owned(), String::new(), "/base".into(), quantization)
    }

    #[test]
    fn files_and_folders_of_peft_are_found_by_their_paths() {
        let folder = folder_with(&[
            "ink.safetensors",
            "styles/oil.safetensors",
            "styles/old/wax.safetensors",
            "a/b/c/too-deep.safetensors",
            "peft/adapter_model.safetensors",
            "peft/adapter_config.json",
            "notes.txt",
            ".hidden.safetensors",
        ]);
        let models = models(folder.path());
        assert_eq!(own_ids(&models), ["ink", "peft", "styles/oil", "styles/old/wax"]);
    }

    /// Ids of the adapters that are listed, without those that ship with the project.
    fn own_ids(models: &Models) -> Vec<String> {
        let listed = models.adapters();
        let ids = listed.iter().map(|adapter| adapter.id.clone());
        ids.filter(|id| !id.starts_with(SHIPPED)).collect()
    }

    #[test]
    fn a_missing_or_deleted_adapter_triggers_a_new_scan() {
        let folder = folder_with(&["ink.safetensors"]);
        let models = models(folder.path());
        let named = |id: &str| models.with_adapters(base(), &[adapter(id, None)], false);
        assert!(named("ink").is_ok());
        std::fs::write(folder.path().join("oil.safetensors"), "{}").unwrap();
        assert!(named("ink").is_ok());
        assert_eq!(own_ids(&models), ["ink"], "nothing was scanned for what is there");
        assert!(named("oil").is_ok());
        assert_eq!(own_ids(&models), ["ink", "oil"]);
        std::fs::remove_file(folder.path().join("ink.safetensors")).unwrap();
        assert!(matches!(named("ink"), Err(Error::Invalid(_))));
        assert_eq!(own_ids(&models), ["oil"]);
        // A folder that does not answer must not block requests for adapters that are listed already.
        let _blocked = models.adapter_listing.block().unwrap();
        assert!(named("oil").is_ok());
    }

    /// Requests, plans and lists use the results of the scan, and read no files.
    #[test]
    fn the_kind_of_an_adapter_is_that_of_the_scan() {
        let folder = folder_with(&[
            "ink.safetensors",
            "peft/adapter_model.safetensors",
            "net/config.json",
        ]);
        let config = folder.path().join("net/config.json");
        std::fs::write(&config, r#"{"_class_name": "FluxControlNetModel"}"#).unwrap();
        let models = models(folder.path());
        let listed: Vec<(String, &str, u64)> = (models.adapters().iter())
            .filter(|adapter| !adapter.id.starts_with(SHIPPED))
            .map(|adapter| (adapter.id.clone(), adapter.kind_name(), adapter.bytes))
            .collect();
        let is = |id: &str, kind, bytes| (id.to_owned(), kind, bytes);
        assert_eq!(
            listed,
            [
                is("ink", "lora", 2),
                is("net", "controlnet", 38),
                is("peft", "lora", 2)
            ]
        );
        std::fs::remove_file(&config).unwrap();
        let with_net = models.with_control_nets(&base(), &["net".to_owned()]).unwrap();
        let ink = [adapter("ink", None)];
        let entry = models.with_adapters(with_net.clone(), &ink, false).unwrap();
        assert_eq!(entry.adapters[0].kind, AdapterKind::Lora);
        let uses = Models::uses_of(&with_net, &[adapter("net", None)]).unwrap();
        assert_eq!(uses, [], "a ControlNet has no strength of an adapter");
        assert!(models.with_control_nets(&base(), &["ink".to_owned()]).is_err());
    }

    #[test]
    fn the_key_includes_adapters_except_those_of_strength_0() {
        let folder = folder_with(&["ink.safetensors", "styles/oil.safetensors"]);
        let models = models(folder.path());
        let key = |asked: &[AskedAdapter]| models.with_adapters(base(), asked, false).unwrap().key;
        assert_eq!(key(&[]), "base+full");
        assert_eq!(
            key(&[adapter("styles/oil.safetensors", None), adapter("ink", Some(0.5))]),
            "base+full&styles/oil&ink"
        );
        assert_eq!(key(&[adapter("ink", Some(0.0))]), "base+full");
        let entry = models
            .with_adapters(base(), &[adapter("ink", None)], false)
            .unwrap();
        assert_eq!(entry.base_key(), "base+full");
    }

    #[test]
    fn strengths_of_an_adapter_that_is_named_several_times_add_up() {
        let folder = folder_with(&["ink.safetensors", "oil.safetensors"]);
        let models = models(folder.path());
        let used = |asked: &[AskedAdapter]| {
            let entry = models.with_adapters(base(), asked, false).unwrap();
            let uses = Models::uses_of(&entry, asked).unwrap();
            let strengths =
                |each: &AdapterUse| (each.name.clone(), each.strength.at(0, 3), each.strength.at(2, 3));
            uses.iter().map(strengths).collect::<Vec<_>>()
        };
        let named = |name: &str, first: f32, last: f32| (name.to_owned(), first, last);
        let twice = [
            adapter("ink", Some(0.5)),
            adapter("oil", None),
            adapter("ink.safetensors", Some(0.25)),
        ];
        assert_eq!(used(&twice), [named("ink", 0.75, 0.75), named("oil", 1.0, 1.0)]);
        assert_eq!(
            used(&[adapter("ink", Some(0.0)), adapter("ink", Some(2.0))]),
            [named("ink", 2.0, 2.0)]
        );
        assert_eq!(used(&[adapter("ink", Some(1.0)), adapter("ink", Some(-1.0))]), []);
        let point = |position, strength| (position, strength);
        let curved = AskedAdapter {
            curve: vec![point(0.0, 1.0), point(1.0, 0.0)],
            ..adapter("ink", None)
        };
        assert_eq!(
            used(&[curved.clone(), adapter("ink", Some(0.5))]),
            [named("ink", 1.5, 0.5)]
        );
        assert_eq!(used(&[curved.clone(), curved]), [named("ink", 2.0, 0.0)]);
    }

    #[test]
    fn an_adapter_is_named_as_it_is_listed_with_its_ending_and_by_a_path_of_windows() {
        let folder = folder_with(&[
            "twin.safetensors",
            "twin.sft",
            "loud.SAFETENSORS",
            "flux/styles/ink.safetensors",
            "te,st.safetensors",
            "v1.safetensors",
            "v1:2.safetensors",
            "a&b.safetensors",
            "back\\slash.safetensors",
        ]);
        let models = models(folder.path());
        let name = |asked: &str| {
            let entry = models.with_adapters(base(), &[adapter(asked, None)], false);
            entry.map(|entry| entry.adapters[0].name.clone())
        };
        let listed = own_ids(&models);
        assert_eq!(listed.len(), 9);
        for id in &listed {
            assert_eq!(name(id).as_ref(), Ok(id));
        }
        for (asked, means) in [
            ("loud.SAFETENSORS", "loud"),
            ("flux\\styles\\ink", "flux/styles/ink"),
            ("flux\\styles\\ink.safetensors", "flux/styles/ink"),
            ("v1:2.safetensors", "v1:2"),
            ("back\\slash.safetensors", "back\\slash"),
        ] {
            assert_eq!(name(asked).as_deref(), Ok(means), "{asked}");
        }
        let refused = name("twin").unwrap_err().to_string();
        assert!(refused.contains("twin.safetensors or twin.sft"), "{refused}");
        assert!(name("loud.sft").is_err());
    }

    #[test]
    fn an_adapter_that_cannot_be_used_is_refused_by_its_field() {
        let folder = folder_with(&["ink.safetensors"]);
        let models = models(folder.path());
        let refused = |asked: &[AskedAdapter]| match models.with_adapters(base(), asked, false) {
            Err(Error::Invalid(problems)) => problems[0].field.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&[adapter("oil", None)]), "model.adapters[0].id");
        assert_eq!(refused(&[adapter("../ink", None)]), "model.adapters[0].id");
        let twice = [adapter("ink", Some(60.0)), adapter("ink", Some(60.0))];
        assert_eq!(refused(&twice), "model.adapters[1].text_strength");
        assert_eq!(
            refused(&[adapter("ink", Some(f32::NAN))]),
            "model.adapters[0].strength"
        );
        let curved = AskedAdapter {
            curve: vec![(2.0, 1.0)],
            ..adapter("ink", None)
        };
        assert_eq!(refused(&[curved]), "model.adapters[0].curve");
        let many = vec![adapter("ink", None); MOST_ADAPTERS + 1];
        assert_eq!(refused(&many), "model.adapters");
    }
}
