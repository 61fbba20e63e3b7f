//! `/sdapi/v1`: pictures as clients of AUTOMATIC1111's web UI ask for them, such as SillyTavern, Open WebUI and LibreChat. They send the
//! settings of samplers with every request; what a model has no use for is left out.

use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use calls::{Asked, Client as Caller, Encoding, ListedModel, OfMedium, Service};
use engine::job::Call;
use engine::{Error, JobState};
use hashlink::LruCache;
use model::{Field, MediaFormat, Medium, Sampler, Sampling};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::errors::{ErrorBody, Failure};
use crate::forms::{Sent, decoded, lenient, model_of};
use crate::images::MOST_PICTURES;
use crate::results::{base64, gathered};
use crate::routes::Client;

/// Most callers whose choice of a model is kept.
const MOST_CHOICES: usize = 1_000;
/// Fields of the service's own requests, as they are called here.
const NAMES: [(&str, &str); 3] = [
    ("init_image", "init_images"),
    ("count", "batch_size"),
    ("strength", "denoising_strength"),
];
/// The samplers, with what its clients call them beside their names. Models that are sampled in one way alone use none of them,
/// and are told to be sampled by Euler's steps.
const SAMPLERS: [(Sampler, &[&str]); 3] = [
    (Sampler::Euler, &["euler", "k_euler"]),
    (Sampler::EulerAncestral, &["euler_ancestral", "k_euler_a"]),
    (Sampler::Dpmpp2mKarras, &["dpmpp_2m_karras", "k_dpmpp_2m_ka"]),
];
/// The field of options with the model.
const CHECKPOINT: &str = "sd_model_checkpoint";

/// The models that callers have set as an option, each for itself.
#[derive(Clone)]
pub(crate) struct Choices(Arc<Mutex<LruCache<Caller, String>>>);

/// The service, and what its callers have chosen.
#[derive(Clone)]
pub(crate) struct Served {
    service: Service,
    choices: Choices,
}

impl Choices {
    fn lock(&self) -> std::sync::MutexGuard<'_, LruCache<Caller, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // a panic leaves it valid
    }

    fn of(&self, client: &Client) -> Option<String> {
        self.lock().get(&client.caller.client()).cloned()
    }
}

/// The routes.
pub(crate) fn routes(service: Service) -> Router {
    let choices = Choices(Arc::new(Mutex::new(LruCache::new(MOST_CHOICES))));
    Router::new()
        .route("/sdapi/v1/txt2img", post(txt2img))
        .route("/sdapi/v1/img2img", post(img2img))
        .route("/sdapi/v1/options", get(options).post(set_options))
        .route("/sdapi/v1/sd-models", get(models))
        .route("/sdapi/v1/progress", get(progress))
        .route("/sdapi/v1/interrupt", post(interrupt))
        .route("/sdapi/v1/{list}", get(lists))
        .with_state(Served { service, choices })
}

/// A request for pictures. Fields that no model here takes are left out, and any may be null.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct SdRequest {
    prompt: Option<String>,
    /// Of models with classifier-free guidance.
    negative_prompt: Option<String>,
    #[serde(deserialize_with = "lenient")]
    width: Option<u32>,
    #[serde(deserialize_with = "lenient")]
    height: Option<u32>,
    #[serde(deserialize_with = "lenient")]
    steps: Option<u32>,
    /// Classifier-free guidance, of models that have it by default.
    #[serde(deserialize_with = "lenient")]
    cfg_scale: Option<f32>,
    /// Guidance of distilled models.
    #[serde(deserialize_with = "lenient")]
    distilled_cfg_scale: Option<f32>,
    /// Less than 0: any.
    seed: Option<i64>,
    #[serde(deserialize_with = "lenient")]
    batch_size: Option<u32>,
    #[serde(deserialize_with = "lenient")]
    n_iter: Option<u32>,
    /// A model of `/v1/models`; also `override_settings.sd_model_checkpoint`.
    model: Option<String>,
    #[schema(value_type = Option<Object>)]
    override_settings: Option<Map<String, Value>>,
    /// False: the answer has no pictures.
    #[serde(deserialize_with = "lenient")]
    send_images: Option<bool>,
    /// Of models that are sampled in several ways: `Euler`, `Euler a` or `DPM++ 2M Karras`; another is left out.
    sampler_name: Option<String>,
    /// Of the same: `Karras` with the sampler `DPM++ 2M`.
    scheduler: Option<String>,
    /// Of img2img: pictures as base64, of which the first is taken.
    init_images: Option<Vec<String>>,
    /// Of img2img: white where the picture is to be changed.
    mask: Option<String>,
    /// Of img2img: whether the mask is black where the picture is to be changed.
    #[serde(deserialize_with = "lenient")]
    inpainting_mask_invert: Option<bool>,
    /// Of img2img: how strongly to change the picture.
    #[serde(deserialize_with = "lenient")]
    denoising_strength: Option<f32>,
}

/// Strength of img2img where none is given, as the clients expect.
const USUAL_STRENGTH: f32 = 0.75;

impl SdRequest {
    fn model(&self, chosen: Option<String>) -> Option<String> {
        let overridden = self.override_settings.as_ref();
        let overridden = overridden.and_then(|settings| settings.get(CHECKPOINT)?.as_str());
        let named = overridden.map(str::to_owned).or_else(|| self.model.clone());
        named.filter(|name| !name.is_empty()).or(chosen)
    }

    /// The sampler that it names, if there is one here.
    fn sampler(&self) -> Option<Sampler> {
        let same = |one: &str, other: &str| one.eq_ignore_ascii_case(other);
        let named = self.sampler_name.as_deref()?;
        let is_karras = self
            .scheduler
            .as_deref()
            .is_some_and(|scheduler| same(scheduler, "karras"));
        if same(named, "DPM++ 2M") && is_karras {
            return Some(Sampler::Dpmpp2mKarras);
        }
        let known = SAMPLERS.iter().find(|(sampler, aliases)| {
            same(named, media::sampler_of(Some(*sampler))) || aliases.iter().any(|alias| same(named, alias))
        });
        known.map(|(sampler, _)| *sampler)
    }

    /// What it asks for, of a model with these defaults.
    fn asked(
        &self,
        client: &Client,
        model: Option<&str>,
        (has_guidance, takes_sampler): (bool, bool),
    ) -> Result<Asked, Failure> {
        let count = self
            .batch_size
            .unwrap_or(1)
            .saturating_mul(self.n_iter.unwrap_or(1));
        if !(1..=MOST_PICTURES).contains(&count) {
            let problem = format!("times n_iter is {count}, which is not from 1 to {MOST_PICTURES}");
            return Err(Failure::field("batch_size", problem));
        }
        let negative = self
            .negative_prompt
            .clone()
            .filter(|text| !text.trim().is_empty());
        Ok(Asked {
            call: Call::GenerateImage,
            model: model_of(model),
            prompt: self.prompt.clone().unwrap_or_default(),
            width: self.width.unwrap_or(0),
            height: self.height.unwrap_or(0),
            count,
            sampling: Sampling {
                steps: self.steps,
                guidance: self.distilled_cfg_scale,
                negative_prompt: negative.filter(|_| has_guidance),
                true_guidance: self.cfg_scale.filter(|_| has_guidance),
                // Models that are sampled in one way alone take no sampler, which clients always send.
                sampler: self.sampler().filter(|_| takes_sampler),
                step_cache: None,
                fp8_attention: None,
                cards: None,
                seed: self.seed.and_then(|seed| u64::try_from(seed).ok()),
                max_sequence_length: None,
                strength: None,
            },
            encoding: Some(Encoding::Png),
            options: Some(client.options()),
            of_medium: OfMedium::Image,
            ..Asked::default()
        })
    }
}

/// The models that make pictures.
async fn picture_models(service: &Service, client: &Client) -> Result<Vec<ListedModel>, Failure> {
    let mut models = service
        .card_memory
        .list_models(false, &client.caller)
        .await?
        .models;
    models.retain(|listed| {
        let details = listed.details.as_ref();
        details.is_ok_and(|details| matches!(details.defaults.medium, Medium::Image(_)))
    });
    Ok(models)
}

/// The name of the model of requests that name none; empty: there is none.
async fn default_of(served: &Served, client: &Client) -> Result<String, Failure> {
    if let Some(chosen) = served.choices.of(client) {
        return Ok(chosen);
    }
    let models = picture_models(&served.service, client).await?;
    let default = models.iter().find(|listed| listed.is_default).or(models.first());
    Ok(default.map(|listed| listed.id.clone()).unwrap_or_default())
}

/// Pictures from a prompt.
#[utoipa::path(post, path = "/sdapi/v1/txt2img", tag = "sdapi", request_body = SdRequest,
    responses((status = 200, body = Object), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn txt2img(
    State(served): State<Served>,
    client: Client,
    Sent(request): Sent<SdRequest>,
) -> Result<Json<Value>, Failure> {
    made(&served, &client, &request, None).await
}

/// Pictures from a picture and a prompt.
#[utoipa::path(post, path = "/sdapi/v1/img2img", tag = "sdapi", request_body = SdRequest,
    responses((status = 200, body = Object), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(crate) async fn img2img(
    State(served): State<Served>,
    client: Client,
    Sent(request): Sent<SdRequest>,
) -> Result<Json<Value>, Failure> {
    let first = request.init_images.as_ref().and_then(|images| images.first());
    let first =
        first.ok_or_else(|| Failure::field("init_images", "is empty: send a picture to start from"))?;
    let init = decoded("init_images", first)?;
    let mask = match &request.mask {
        Some(mask) if !mask.is_empty() => Some(decoded("mask", mask)?),
        _ => None,
    };
    let mask = match mask {
        Some(mask) if request.inpainting_mask_invert == Some(true) => {
            let inverted = tokio::task::spawn_blocking(move || media::pictures::inverted_mask(&mask)).await;
            let inverted = inverted.map_err(|panic| Error::Internal(panic.to_string()))?;
            Some(
                inverted
                    .map_err(|problem| Failure::field("mask", problem))?
                    .into(),
            )
        }
        mask => mask,
    };
    let strength = request.denoising_strength.unwrap_or(USUAL_STRENGTH);
    made(&served, &client, &request, Some((init, mask, strength))).await
}

async fn made(
    served: &Served,
    client: &Client,
    request: &SdRequest,
    start: Option<(Bytes, Option<Bytes>, f32)>,
) -> Result<Json<Value>, Failure> {
    let model = match request.model(served.choices.of(client)) {
        Some(model) => model,
        None => default_of(served, client).await?,
    };
    let known = picture_models(&served.service, client).await?;
    let base = model.split_once('+').map_or(model.as_str(), |(base, _)| base);
    let details = known
        .iter()
        .find(|listed| listed.id == model || listed.id == base);
    let defaults = details.and_then(|listed| listed.details.as_ref().ok());
    let has_guidance = defaults.is_some_and(|details| details.defaults.true_guidance > 1.0);
    let takes_sampler = defaults.is_some_and(|details| details.reads.has(Field::Sampler));
    let mut asked = request.asked(client, Some(&model), (has_guidance, takes_sampler))?;
    let sampler = media::sampler_of(asked.sampling.sampler);
    if let Some((init, mask, strength)) = start {
        asked.init_image = Some(init);
        asked.mask = mask.map(Into::into);
        asked.sampling.strength = Some(strength);
    }
    let started = served.service.generation.generate(asked, &client.caller).await;
    let started = started.map_err(|error| Failure::from(error).with_fields_named(&NAMES))?;
    let (files, report) = gathered(started.events).await?;
    let images: Vec<String> = files.files().map(|file| base64(&file.data)).collect();
    let size = match files.files().next().and_then(|file| file.format) {
        Some(MediaFormat::Image { width, height }) => (width, height),
        _ => (0, 0), // it is a picture
    };
    Ok(Json(answer(
        request,
        (&model, sampler),
        report.seed,
        size,
        images,
    )))
}

/// The answer in the form that the clients read: `info` is JSON in a text.
fn answer(
    request: &SdRequest,
    (model, sampler): (&str, &str),
    seed: u64,
    (width, height): (u32, u32),
    images: Vec<String>,
) -> Value {
    let prompt = request.prompt.clone().unwrap_or_default();
    let negative = request.negative_prompt.clone().unwrap_or_default();
    let (steps, cfg) = (request.steps.unwrap_or(0), request.cfg_scale.unwrap_or(1.0));
    let seed_of = |item| seed.wrapping_add(item);
    let seeds: Vec<u64> = (0..images.len() as u64).map(seed_of).collect();
    let told = format!(
        "{prompt}\nNegative prompt: {negative}\nSteps: {steps}, Sampler: {sampler}, CFG scale: {cfg}"
    );
    let of_seed = |seed: &u64| format!("{told}, Seed: {seed}, Size: {width}x{height}, Model: {model}");
    let texts: Vec<String> = seeds.iter().map(of_seed).collect();
    let info = json!({
        "prompt": prompt, "all_prompts": vec![&prompt; images.len()],
        "negative_prompt": negative, "all_negative_prompts": vec![&negative; images.len()],
        "seed": seed, "all_seeds": seeds, "width": width, "height": height, "sampler_name": sampler, "cfg_scale": cfg,
        "steps": steps, "batch_size": images.len(), "sd_model_name": model,
        "denoising_strength": request.denoising_strength, "clip_skip": 1, "extra_generation_params": {},
        "index_of_first_image": 0, "infotexts": texts,
    });
    let parameters = json!({
        "prompt": prompt, "negative_prompt": negative, "seed": seed, "width": width, "height": height, "steps": steps,
        "cfg_scale": cfg, "batch_size": images.len(), "sampler_name": sampler,
    });
    let images = if request.send_images == Some(false) {
        Vec::new()
    } else {
        images
    };
    json!({"images": images, "parameters": parameters, "info": info.to_string()})
}

/// The options of a caller: the model of its requests.
#[utoipa::path(get, path = "/sdapi/v1/options", tag = "sdapi", responses((status = 200, body = Object)))]
pub(crate) async fn options(State(served): State<Served>, client: Client) -> Result<Json<Value>, Failure> {
    let model = default_of(&served, &client).await?;
    Ok(Json(json!({
        CHECKPOINT: model, "samples_format": "png", "CLIP_stop_at_last_layers": 1, "sd_vae": "Automatic",
    })))
}

/// Sets the model of a caller's further requests. Other options are left out.
#[utoipa::path(post, path = "/sdapi/v1/options", tag = "sdapi", request_body = Object,
    responses((status = 200), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn set_options(
    State(served): State<Served>,
    client: Client,
    Sent(options): Sent<Map<String, Value>>,
) -> Result<Json<Value>, Failure> {
    if let Some(name) = options.get(CHECKPOINT).and_then(Value::as_str) {
        let models = picture_models(&served.service, &client).await?;
        let base = name.split_once('+').map_or(name, |(base, _)| base);
        if !models.iter().any(|listed| listed.id == name || listed.id == base) {
            return Err(Error::ModelNotFound { id: name.to_owned() }.into());
        }
        let caller = client.caller.client();
        served.choices.lock().insert(caller, name.to_owned());
    }
    Ok(Json(Value::Null))
}

/// The models that make pictures.
#[utoipa::path(get, path = "/sdapi/v1/sd-models", tag = "sdapi", responses((status = 200, body = Vec<Object>)))]
pub(crate) async fn models(State(served): State<Served>, client: Client) -> Result<Json<Value>, Failure> {
    let models = picture_models(&served.service, &client).await?;
    let models = models.iter().map(|listed| {
        json!({"title": listed.id, "model_name": listed.id, "hash": null, "sha256": null, "filename": listed.id, "config": null})
    });
    Ok(Json(models.collect()))
}

/// How far the caller's running job is.
#[utoipa::path(get, path = "/sdapi/v1/progress", tag = "sdapi", responses((status = 200, body = Object)))]
pub(crate) async fn progress(State(served): State<Served>, client: Client) -> Json<Value> {
    let jobs = served.service.jobs.own(&client.caller).await;
    let running = jobs.iter().find(|job| job.state == JobState::Running);
    let (step, steps) = running.map_or((0, 0), |job| (job.step, job.steps));
    let part = if steps > 0 {
        f64::from(step) / f64::from(steps)
    } else {
        0.0
    };
    let left = jobs.len();
    Json(json!({
        "progress": part, "eta_relative": 0.0,
        "state": {"skipped": false, "interrupted": false, "job": running.map(|job| job.id.to_string()).unwrap_or_default(),
            "job_count": left, "job_timestamp": "0", "job_no": 0, "sampling_step": step, "sampling_steps": steps},
        "current_image": null, "textinfo": null,
    }))
}

/// Cancels the caller's jobs that run.
#[utoipa::path(post, path = "/sdapi/v1/interrupt", tag = "sdapi", responses((status = 200, body = Object)))]
pub(crate) async fn interrupt(State(served): State<Served>, client: Client) -> Result<Json<Value>, Failure> {
    let jobs = &served.service.jobs;
    for job in jobs.own(&client.caller).await {
        if job.state == JobState::Running && job.call == Call::GenerateImage {
            let id = job.id.to_string();
            jobs.cancel(&id, client.name.clone(), true, &client.caller)
                .await?;
        }
    }
    Ok(Json(json!({})))
}

/// Lists of what does not differ between models here: samplers, schedulers, upscalers.
#[utoipa::path(get, path = "/sdapi/v1/{list}", tag = "sdapi", params(("list" = String, Path)),
    responses((status = 200, body = Vec<Object>), (status = 404, body = ErrorBody)))]
pub(crate) async fn lists(list: Result<Path<String>, PathRejection>) -> Result<Json<Value>, Failure> {
    let Path(list) = list?;
    let none = Value::Null;
    Ok(Json(match list.as_str() {
        "samplers" => SAMPLERS
            .iter()
            .map(|(sampler, aliases)| {
                json!({"name": media::sampler_of(Some(*sampler)), "aliases": aliases, "options": {}})
            })
            .collect(),
        "schedulers" => {
            json!([{"name": "automatic", "label": "Automatic", "aliases": none, "default_rho": -1, "need_inner_model": false}])
        }
        "upscalers" => {
            json!([{"name": "None", "model_name": none, "model_path": none, "model_url": none, "scale": 4}])
        }
        "latent-upscale-modes" | "sd-vae" | "sd-modules" | "loras" => json!([]),
        _ => return Err(Failure::no_path(&format!("/sdapi/v1/{list}"))),
    }))
}
