import { plan, planProblem, planWords } from "../plan";
import { Fallbacks } from "./fallbacks";

/** What the service would do with this request. */
export function PlanLine() {
  const told = plan.value;
  const problem = planProblem.value;
  const short = told?.stages.find((stage) => stage.verdict !== "run");
  const streamed = told?.stages.flatMap((stage) => stage.streamed) ?? [];
  return (
    <div class="plan" aria-live="polite">
      {problem && <p class="problem">{problem.message}</p>}
      {told && <p class={short?.verdict === "never" ? "problem" : "quiet"}>{planWords(told)}</p>}
      {[...new Map(streamed.map((each) => [each.name, each])).values()].map((each) => (
        <p key={each.name} class="quiet">
          {each.name} is streamed: {each.words}
        </p>
      ))}
      {told && <Fallbacks title="This would fit:" fallbacks={short?.shortfall?.fallbacks ?? []} />}
      {problem && <Fallbacks title="This would fit:" fallbacks={problem.fallbacks} />}
      {told && <Fallbacks title="Fits as well, and loses less:" fallbacks={told.upgrades} />}
    </div>
  );
}
