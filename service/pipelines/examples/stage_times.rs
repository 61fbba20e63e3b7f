//! Where the time of a picture goes on the CPU: seconds of each stage of a FLUX model, the best and the median of some
//! runs, and of the processors together for a picture. `stage_times FOLDER SIDES [RUNS]`, for instance `stage_times demo/model 128,256 10`.
#![allow(clippy::print_stdout)]

#[path = "../tests/processor_time/mod.rs"]
mod processor_time;

use std::collections::HashMap;
use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device};
use gpu::{ComponentTensors, CpuCard, CpuSettings, Gpu};
use pipelines::flux::FluxModel;
use pipelines::{Image, Medium, Model, Precision, Request, StageRun, Unobserved, Values};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, folder, sides, rest @ ..] = arguments.as_slice() else {
        return Err("stage_times FOLDER SIDES [RUNS]".into());
    };
    let runs = rest.first().map_or(Ok(5u32), |runs| runs.parse())?;
    let (model, tensors) = loaded(Path::new(folder))?;
    for side in sides.split(',') {
        let side: u32 = side.parse()?;
        let request = Request {
            prompt: "a red circle above a blue square".to_owned(),
            seed: 1,
            ..Request::of(Medium::Image(Image::of(side, side)), 8, 3.5, 48)
        };
        times_of_stages(&model, &tensors, &request)?;
        let before = processor_time::of_process();
        let times = (0..runs)
            .map(|_| times_of_stages(&model, &tensors, &request))
            .collect::<Result<Vec<_>, _>>()?;
        let processor = (processor_time::of_process() - before) / f64::from(runs);
        let stages = times.first().map_or(0, Vec::len);
        let mut line = format!("{side}:");
        for stage in 0..=stages {
            let of_run = |run: &Vec<(String, f64)>| match run.get(stage) {
                Some((_, seconds)) => *seconds,
                None => run.iter().map(|(_, seconds)| seconds).sum(),
            };
            let mut seconds: Vec<f64> = times.iter().map(of_run).collect();
            seconds.sort_by(f64::total_cmp);
            let name = times[0].get(stage).map_or("all", |(name, _)| name.as_str());
            line += &format!(" {name} {:.4} ({:.4})", seconds[0], seconds[seconds.len() / 2]);
        }
        println!("{line}; of the processors {processor:.3}");
    }
    Ok(())
}

type Components = HashMap<String, Arc<ComponentTensors>>;

fn loaded(folder: &Path) -> Result<(FluxModel, Components), Box<dyn Error>> {
    let model = FluxModel::open(folder, &Precision::full(DType::F32))?.ok_or("no FLUX model")?;
    let mut card = CpuCard::new(CpuSettings::default())?;
    let mut tensors = HashMap::new();
    for component in model.components() {
        let plan = model.load_plan(&component.name).ok_or("no plan")?;
        card.load(component, plan, residency::Part::WHOLE, &mut |_| {
            ControlFlow::Continue(())
        })?;
        tensors.insert(component.name.clone(), card.tensors(&component.id)?);
    }
    Ok((model, tensors))
}

/// Seconds of each stage.
fn times_of_stages(
    model: &FluxModel,
    tensors: &Components,
    request: &Request,
) -> Result<Vec<(String, f64)>, Box<dyn Error>> {
    let mut values = Values::new();
    let mut times = Vec::new();
    let stages = model.plan(request);
    for plan in stages.map_err(|problems| format!("the request is refused: {problems:?}"))? {
        let give = |name: &str| Ok(Arc::clone(&tensors[name]));
        let start = Instant::now();
        let stage = StageRun {
            plan: &plan,
            rung: 0,
            request,
            values: &values,
            tensors: &give,
            device: &Device::Cpu,
            part: None,
        };
        let given = model.run(&stage, &mut Unobserved)?;
        times.push((plan.name.clone(), start.elapsed().as_secs_f64()));
        values.extend(given);
    }
    Ok(times)
}
