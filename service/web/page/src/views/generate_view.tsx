import { useEffect } from "preact/hooks";
import { isPlanning } from "../plan";
import { Form } from "./form_view";
import { Runs } from "./runs_view";

export function GenerateView({ isShown }: { isShown: boolean }) {
  useEffect(() => {
    isPlanning.value = isShown;
  }, [isShown]);
  return (
    <div class="generate">
      <Form />
      <Runs />
    </div>
  );
}
