// A stand-in of ComfyUI's `api`.

export const api = {
  apiURL: (route) => `/api${route}`,
  fetchApi: (route, options) => fetch(`/api${route}`, options),
};
